"""The command line of the fleet's simulation, described in the package's docstring."""

import argparse

from .fleet import Broken, Fleet, Setting


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--routers", type=int, default=4)
    parser.add_argument("--conversations", type=int, default=100_000)
    parser.add_argument("--duration", type=float, default=600.0, help="virtual seconds in which conversations begin")
    parser.add_argument("--deaths", type=int, default=20)
    parser.add_argument("--slow", type=int, default=0, help="engines that are ten times slower for a while")
    parser.add_argument("--upgrade", action="store_true", help="replace every engine, one after another")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    setting = Setting(
        num_engines=given.engines,
        num_routers=given.routers,
        num_conversations=given.conversations,
        duration=given.duration,
        deaths=given.deaths,
        num_slow=given.slow,
        is_upgraded=given.upgrade,
    )
    fleet = Fleet(setting, given.seed)
    try:
        fleet.run()
        broken = ""
    except Broken as error:
        broken = str(error)
    found, computed = (sum(getattr(e, name) for e in fleet.engines.values()) for name in ("num_found", "num_computed"))
    print(f"{fleet.now:.0f} virtual seconds")
    print(f"prompt tokens found in a prefix cache: {found / (found + computed):.1%}")
    print(f"requests at an engine: {fleet.max_mean:.1f} on average at the busiest time")
    for name, count in sorted(fleet.counts.items()):
        print(f"  {name}: {count:,}")
    print(broken or "every invariant holds")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
