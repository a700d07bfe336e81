"""A process with phases of different length and kind, for record.sh."""

import json
import re
import zlib

for step in range(12):
    rows = [{"id": i, "name": f"row {i * step}", "tags": [i % 7, i % 11]} for i in range(20_000)]
    text = json.dumps(rows)
    json.loads(text)
    re.findall(r"row \d+5", text)
    zlib.compress(text.encode(), 1 + step % 9)
    sorted(rows, key=lambda r: r["name"])
    with open("/dev/null", "wb", buffering=0) as sink:
        for i in range(20_000):
            sink.write(b"x")
