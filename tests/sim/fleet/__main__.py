"""The command line of the fleet's simulation, described in the package's docstring."""

import argparse

from msgspec.structs import replace

from .fleet import Broken, Fleet, Setting


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--routers", type=int, nargs="+", default=[4], help="several numbers: one history for each")
    parser.add_argument("--conversations", type=int, default=100_000)
    parser.add_argument("--duration", type=float, default=600.0, help="virtual seconds in which conversations begin")
    parser.add_argument("--deaths", type=int, default=20)
    parser.add_argument("--slow", type=int, default=0, help="engines that are ten times slower for a while")
    parser.add_argument("--short", type=float, default=0.0, help="share of conversations that are one short question")
    parser.add_argument("--upgrade", action="store_true", help="replace every engine, one after another")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    setting = Setting(
        num_engines=given.engines,
        num_conversations=given.conversations,
        duration=given.duration,
        deaths=given.deaths,
        num_slow=given.slow,
        share_short=given.short,
        is_upgraded=given.upgrade,
    )
    return max(play(replace(setting, num_routers=num), given.seed) for num in given.routers)


def play(setting: Setting, seed: int) -> int:
    """Plays and prints one history. The exit code."""
    fleet = Fleet(setting, seed)
    try:
        fleet.run()
        broken = ""
    except Broken as error:
        broken = str(error)
    print(f"{setting.num_routers} routers, {fleet.now:.0f} virtual seconds")
    print(f"prompt tokens found in a prefix cache: {fleet.share_found:.1%}")
    print(f"requests at an engine: {fleet.max_mean:.1f} on average at the busiest time")
    print(f"the busiest engine has {fleet.unevenness:.2f} times the mean load, on average")
    for name, count in sorted(fleet.counts.items()):
        print(f"  {name}: {count:,}")
    print(broken or "every invariant holds")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
