#!/usr/bin/env python3
"""Works out from orders.ndjson alone what the quickstart must come to. Usage: ./expect.py < orders.ndjson > orders.expected.json

Shares no code with the quickstart on purpose. What has to hold whatever dies on the way:
  each line is sent once; billing bills each order that can be paid once, however often it comes; each line that cannot be
  billed ends in billing's dead letters once, with its reason; analytics sees every line.
"""
import json
import sys

REASONS = {"unknown-customer": "permanent", "refused": "max-attempts", "deadly": "crash"}


def order(line):
    try:
        value = json.loads(line)
    except ValueError:
        return None
    good = isinstance(value, dict) and isinstance(value.get("cents"), int)
    good = good and all(isinstance(value.get(key), str) for key in ("id", "customer", "payment"))
    return value if good else None


lines = [line for line in sys.stdin.read().splitlines() if line]
billed, repeats, dead, seen, unreadable = {}, 0, {}, 0, 0
for line in lines:
    value = order(line)
    if value is None:
        dead["undecodable"] = dead.get("undecodable", 0) + 1
        unreadable += 1
        continue
    seen += value["cents"]
    reason = REASONS.get(value["payment"])
    if reason:
        dead[reason] = dead.get(reason, 0) + 1
    elif value["id"] in billed:
        repeats += 1
    else:
        billed[value["id"]] = value["cents"]

json.dump(
    {
        "sent": len(lines),
        "billing": {
            "handled": len(billed) + repeats,
            "billed_orders": len(billed),
            "billed_cents": sum(billed.values()),
            "repeated": repeats,
            "dead_letters": dict(sorted(dead.items())),
        },
        "analytics": {"handled": len(lines), "unreadable": unreadable, "cents": seen},
    },
    sys.stdout,
    indent=2,
)
print()
