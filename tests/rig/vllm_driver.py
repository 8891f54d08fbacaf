"""Drives vLLM's own request function, unmodified, as `vllm bench serve` does, in vLLM's environment of `.cache/peers`.

`vllm_driver.py ENDPOINT_REQUEST_FUNC.py URL MODEL STREAMS REQUESTS OUT`: one session with its connector's settings, all
requests as tasks behind a semaphore, the garbage collector frozen, percentiles by numpy.
"""

import asyncio
import gc
import importlib.util
import json
import sys
from pathlib import Path

import aiohttp
import numpy as np

code, url, model, streams, requests, out = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6]
spec = importlib.util.spec_from_file_location("endpoint_request_func", code)
assert spec is not None
assert spec.loader is not None
theirs = importlib.util.module_from_spec(spec)
sys.modules["endpoint_request_func"] = theirs
spec.loader.exec_module(theirs)


async def main() -> None:
    connector = aiohttp.TCPConnector(
        limit=streams, limit_per_host=streams, ttl_dns_cache=300, use_dns_cache=True, keepalive_timeout=60,
        enable_cleanup_closed=True, force_close=False,
    )  # fmt: skip
    timeout = aiohttp.ClientTimeout(total=6 * 60 * 60)
    seats = asyncio.Semaphore(streams)
    prompt = " ".join(f"w{n}" for n in range(1, 17))
    async with aiohttp.ClientSession(connector=connector, trust_env=True, timeout=timeout) as session:

        async def one():
            asked = theirs.RequestFuncInput(
                prompt=prompt, api_url=f"{url}/v1/chat/completions", prompt_len=16, output_len=128, model=model,
                model_name=model,
            )  # fmt: skip
            async with seats:
                return await theirs.async_request_openai_chat_completions(asked, session)

        gc.collect()
        gc.freeze()
        answers = await asyncio.gather(*(asyncio.create_task(one()) for _ in range(requests)))
    ok = [answer for answer in answers if answer.success]
    ttft = [answer.ttft * 1e3 for answer in ok]
    gaps = [gap * 1e3 for answer in ok for gap in answer.itl]
    found = {"done": len(ok)}
    for name, values in (("ttft", ttft), ("gap", gaps)):
        found |= {f"{name}_p50": float(np.percentile(values, 50)), f"{name}_p99": float(np.percentile(values, 99))}
    Path(out).write_text(json.dumps(found))


asyncio.run(main())
