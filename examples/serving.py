"""The official client against a server of its own, streaming: `python examples/serving.py`.

It needs `pip install openai`. A server that runs already needs only the second half:
`OpenAI(base_url="http://…/v1")`.
"""

import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from openai import OpenAI

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
server = subprocess.Popen(
    [Path(sys.executable).with_name("penstock"), "serve", "--port", str(port)]
)
try:
    while True:  # the port is open before the model is loaded; /ready says when it is
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready"):
                break
        except OSError:
            if server.poll() is not None:
                sys.exit("The server has ended.")
            time.sleep(0.1)

    with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        chunks = client.completions.create(
            model=model,
            prompt="Once upon a time",
            max_tokens=40,
            seed=7,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in chunks:
            for choice in chunk.choices:
                print(choice.text, end="", flush=True)
            if chunk.usage is not None:
                print(f"\n{chunk.usage.completion_tokens} tokens, {chunk.penstock}")
finally:
    server.terminate()
    server.wait()
