#!/usr/bin/env python3
"""Makes orders.ndjson: 10,000 orders, one a line, always the same ones. Usage: ./make_orders.py > orders.ndjson

Most orders are plain. Some are there to make trouble:
  malformed    cut off, not JSON, or without the field that billing needs      120
  repeated     the same order once more, as a sender would that saw no answer  200
  unknown      a customer that nobody knows: no retry can help                  40
  refused      a card that is refused each time                                 60
  flaky        a payment service that fails twice and then works               150
  deadly       takes the member down that handles it                             1
"""
import json
import random

LINES = 10_000
TROUBLE = [("malformed", 120), ("repeated", 200), ("unknown", 40), ("refused", 60), ("flaky", 150), ("deadly", 1)]

rng = random.Random(7)
kinds = [kind for kind, count in TROUBLE for _ in range(count)]
kinds += ["plain"] * (LINES - len(kinds))
rng.shuffle(kinds)

plain = []
for line, kind in enumerate(kinds, 1):
    if kind == "repeated" and plain:
        print(rng.choice(plain))
        continue
    order = {
        "id": f"order-{line:05}",
        "customer": f"customer-{rng.randrange(500):03}",
        "cents": rng.randrange(100, 50_000),
        "payment": {"unknown": "unknown-customer", "refused": "refused", "flaky": "flaky", "deadly": "deadly"}.get(kind, "card"),
    }
    text = json.dumps(order, separators=(",", ":"))
    if kind == "malformed":
        text = [text[: rng.randrange(5, 30)], "not json at all", json.dumps({"id": order["id"]}), '{"cents":"many"}'][line % 4]
    elif kind in ("plain", "repeated"):
        plain.append(text)
    print(text)
