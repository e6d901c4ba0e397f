"""Simulates routers in front of many engines, under a virtual clock: the real `Choice`, and engines that are a cost
model with a cache of prefixes.

`python -m tests.sim.fleet --engines 1000 --conversations 1000000` plays a night's worth; `--help` shows the rest.
"""
