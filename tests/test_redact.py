"""What may be passed on of a command line and an environment: everything that explains a result, nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen import redact

KEY = "zebra-9f8e7d6c5b4a"


@pytest.mark.parametrize(
    "words",
    [
        ["--api-key", KEY], [f"--api-key={KEY}"], ["--api-key", "one", KEY], ["--api-key", f"-{KEY}"],
        ["--api_key", KEY],
        ["--hf-token", KEY], ["-hft", KEY], [f"--hf-token={KEY}"], ["--ssl-keyfile-password", KEY], ["--apiKey", KEY],
        [f"VLLM_API_KEY={KEY}"], ["--header", f"Authorization: Bearer {KEY}"], [f'{{"api_key": "{KEY}"}}'],
        [f"http://user:{KEY}@127.0.0.1:8000/v1"], [f"bash -c 'export HF_TOKEN={KEY}; vllm serve m --api-key {KEY}'"],
        [f"sh -c \"sh -c 'x --token {KEY}'\""], ["--otlp", f"https://{KEY}.example.org/x"],
        ["--extra", f"password: {KEY}"],
        # two words in one
        ["--accesskey", KEY], ["--authtoken", KEY], ["--HFTOKEN", KEY], ["--apikeys", KEY], [f"--secretkey={KEY}"],
        ["-e", f"PGPASSWORD={KEY}"], [f"export VLLM_APITOKEN={KEY}; vllm serve m"],
    ],
)  # fmt: skip
def test_key_is_hidden_however_it_was_given(words: list[str]) -> None:
    assert KEY not in " ".join(redact.words(["/usr/bin/server", *words, "--port", "8000"]))


@pytest.mark.parametrize(
    "word",
    ["sk-abcdefgh1234", "hf_abcdefghijklmnop", "ghp_abcdefghijklmnop12", "nvapi-abcdefghijk", "AKIAABCDEFGHIJKLMNOP",
     "eyJhbGciOiJIUzI1.eyJzdWIiOiIx.abc", "aB3dE5fG7hI9jK1lM3nO5pQ7rS", "0123456789abcdef0123456789abcdef"],
)  # fmt: skip
def test_word_that_looks_like_a_key_is_hidden_wherever_it_stands(word: str) -> None:
    assert word not in " ".join(redact.words(["server", word, f"--x={word}", f"a {word} b"]))


@pytest.mark.parametrize(
    ("word", "hidden"),
    [("10.1.2.3", "10.1.2.3"), ("spark-7.lan:5000", "spark-7"), ("[fe80::1]:50052", "fe80"),
     ("192.168.0.7:5", "192.168"),
     ("tcp://head:6379", "head")],
)  # fmt: skip
def test_address_is_hidden_after_a_flag_that_names_a_place(word: str, hidden: str) -> None:
    assert hidden not in " ".join(redact.words(["server", "--dist-init-addr", word, f"--host={word}", "--port", "1"]))


@pytest.mark.parametrize("word", ["spark-7:50052", "spark-7:50052,spark-8:50052"])
def test_machines_that_compute_for_llama_cpp_are_hidden(word: str) -> None:
    assert redact.words(["llama-server", "--rpc", word]) == ["llama-server", "--rpc", "…:50052"]


@pytest.mark.parametrize(
    "word", ["alice@spark-7", "--peer=alice@spark-7", "alice@spark-7.lan", "scp alice@spark-7:x y"]
)
def test_user_of_a_machine_is_hidden(word: str) -> None:
    said = " ".join(redact.words(["server", word]))
    assert "alice" not in said
    assert "spark" not in said


@pytest.mark.parametrize("word", ["--rpc 10.1.2.3:50052", "--peer fe80::1ff:fe23:4567:890a", "--mac 00:1a:2b:3c:4d:5e"])
def test_number_of_a_machine_is_hidden_after_any_flag(word: str) -> None:
    assert word.split()[1] not in " ".join(redact.words(["server", *word.split()]))


@pytest.mark.parametrize(
    ("path", "kept"),
    [("/models/Qwen/Qwen3-8B", "Qwen3-8B"), ("~/m/x-Q4_K_M.gguf", "x-Q4_K_M.gguf"), ("./a/b.gguf", "b.gguf"),
     ("../../x/y.json", "y.json"), ("models/qwen/y.gguf", "y.gguf")],
)  # fmt: skip
def test_path_keeps_its_last_part(path: str, kept: str) -> None:
    said = redact.words(["/opt/bin/llama-server", "-m", path, f"--mmproj={path}"])
    assert said == ["llama-server", "-m", f"…/{kept}", f"--mmproj=…/{kept}"]


@pytest.mark.parametrize("home", ["/home/alice", "/home/alice/", "/root", "/Users/alice"])
def test_home_folder_leaves_no_name(home: str) -> None:
    assert "alice" not in " ".join(redact.words(["server", "--download-dir", home, f"--cache={home}"]))


@pytest.mark.parametrize(
    ("word", "said"),
    [("/srv/a/m:/home/alice/m", "…/m:…/m"), ("name:/home/alice/lora", "name:…/lora"), ("x:~/y/z", "x:…/z")],
)
def test_each_path_of_a_list_keeps_its_last_part_alone(word: str, said: str) -> None:
    assert redact.words(["server", "-v", word, f"--mount={word}"]) == ["server", "-v", said, f"--mount={said}"]
    assert redact.settings([f"LD_PRELOAD={word}"]) == {"LD_PRELOAD": said}


def test_what_explains_a_result_is_kept() -> None:
    line = (
        "vllm serve org/Model-7B-Instruct-FP8 --port 8000 --host 0.0.0.0 --max-num-batched-tokens 8192 "
        "--max-model-len 262144 --gpu-memory-utilization 0.85 --tokenizer-mode auto --trust-remote-code "
        "--kv-cache-dtype fp8 -ngl -1 -ts 1,2 --hf-overrides {} --hf_overrides {} --draft org/Model@main "
        "--revision 0123456789abcdef0123456789abcdef01234567 --override-kv a=int:3"
    )
    assert " ".join(redact.words(line.split())) == line


def test_only_settings_that_explain_a_result_are_kept() -> None:
    environ = [
        "CUDA_VISIBLE_DEVICES=0,1", f"VLLM_API_KEY={KEY}", "VLLM_HOST_IP=10.0.0.3", "NCCL_SOCKET_IFNAME=eth0",
        "HOME=/home/a",
        f"HF_TOKEN={KEY}", "LLAMA_ARG_MODEL=/srv/m/x.gguf", "OMP_NUM_THREADS=4", "AWS_SECRET_ACCESS_KEY=x", "nonsense",
        f"VLLM_LOGITS_PROCESSORS=https://u:{KEY}@h/x", "VLLM_MAX_TOKENS=5",
    ]  # fmt: skip
    assert redact.settings(environ) == {
        "CUDA_VISIBLE_DEVICES": "0,1", "VLLM_API_KEY": "…", "VLLM_HOST_IP": "…", "NCCL_SOCKET_IFNAME": "eth0",
        "LLAMA_ARG_MODEL": "…/x.gguf", "OMP_NUM_THREADS": "4", "VLLM_LOGITS_PROCESSORS": "…", "VLLM_MAX_TOKENS": "5",
    }  # fmt: skip


@given(st.lists(st.text(max_size=30), max_size=20), st.sampled_from(["--api-key", "--hf-token", "--password"]))
def test_whatever_stands_around_it_the_word_after_a_secret_flag_is_hidden(words: list[str], flag: str) -> None:
    said = redact.words(["server", *words, "--port", "1", flag, KEY, *words])
    assert KEY not in "\0".join(said)
    assert all(len(word) <= redact.MAX_WORD_CHARS for word in said)


def test_command_line_without_end_is_cut() -> None:
    said = redact.words(["server", *["x"] * 1000])
    assert len(said) == redact.MAX_WORDS + 1
    assert said[-1] == "… and 801 more"
