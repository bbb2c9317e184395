"""A conversation of any length: older turns become a summary, which is sent back as an item.

`python examples/long_conversation.py`, which needs `pip install openai`, starts a server of its
own; one that runs already needs only the second half.
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
        items = []
        for turn in range(12):
            items.append({"role": "user", "content": f"Tell me story number {turn} of a dog."})
            answer = client.responses.create(
                model=model,
                instructions="You tell stories.",
                input=items,
                max_output_tokens=60,
                context_management=[{"type": "compaction", "compact_threshold": 400}],
            )
            output = [item.model_dump() for item in answer.output]
            if answer.output[0].type == "compaction":
                items = []  # the summary stands for all of them
            items += output
            print(turn, answer.usage.input_tokens, answer.penstock.get("compaction", ""))
finally:
    server.terminate()
    server.wait()
