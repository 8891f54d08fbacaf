"""SGLang's Rust client out of its wheel, without the package: `sglang_rust.py HOME ARGUMENTS…`."""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

home = Path(sys.argv.pop(1))
library = next((home / "wheel/sglang/srt/rust_extensions").glob("_bench*.so"))
spec = importlib.util.spec_from_file_location("_bench", library)
assert spec is not None
assert spec.loader is not None
bench = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bench)
sys.argv[0] = "sglang-bench"
sys.exit(bench.run_argv(sys.argv))
