"""`python -m tests.explorer`: explore worlds, print what was seen of each, and run traces again."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tests.explorer
from tests.explorer.mistakes import MISTAKES
from tests.explorer.model import Broken, World
from tests.explorer.search import Result, explore, replay
from tests.explorer.worlds import MODES, worlds


def main(given: Sequence[str] | None = None) -> int:
    """Explore what was asked for. Returns 1 if a property does not hold."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.explorer",
        description=tests.explorer.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--mode", metavar="MODE", help=f"worlds of this mode only: {', '.join(MODES)}")
    parser.add_argument(
        "--options", type=int, default=9, metavar="N", help="worlds with N unusual options at most; all"
    )
    parser.add_argument(
        "--cap", type=int, default=2_000, metavar="N", help="states of a world, at most; 2,000"
    )
    parser.add_argument("--walks", type=int, default=10, metavar="N", help="random walks beyond the cap; 10")
    parser.add_argument("--world", metavar="JSON", help="this world only, as a fault's line has it")
    parser.add_argument("--trace", metavar="JSON", help="with --world: run these events again, and show them")
    parser.add_argument("--mistake", choices=sorted(MISTAKES), help="make this mistake on purpose")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was seen of each world")
    args = parser.parse_args(given)
    if args.mode is not None and args.mode not in MODES:
        parser.error(f"--mode {args.mode}: give one of {', '.join(MODES)}")
    mistake = MISTAKES.get(args.mistake)
    chosen = [_world(args.world)] if args.world else [*worlds(args.mode, at_once=args.options)]
    if mistake is not None:
        chosen = chosen if args.world else [mistake.world]
        with mistake.made():
            return _run(chosen, args)
    return _run(chosen, args)


def _run(chosen: list[World], args: argparse.Namespace) -> int:
    if args.trace:
        return _show(chosen[0], json.loads(args.trace))
    results = []
    for world in chosen:
        result = explore(world, args.cap, walks=args.walks)
        results.append(result)
        print(result, flush=True)
        if result.fault is not None:
            _show(world, result.trace)
            again = f"--world '{json.dumps(world._asdict())}' --trace '{json.dumps(result.trace)}'"
            mistake = f" --mistake '{args.mistake}'" if args.mistake else ""
            print(f"  again: python -m tests.explorer {again}{mistake}")
    failed = [result for result in results if result.fault is not None]
    states = sum(result.states for result in results)
    transitions = sum(result.transitions for result in results)
    exhausted = sum(result.exhausted for result in results)
    print(
        f"{len(results)} worlds, {exhausted} of them exhausted: {states:,} states, "
        f"{transitions:,} transitions; {len(failed)} with a fault"
    )
    if args.json is not None:
        args.json.write_text(json.dumps([_facts(result) for result in results], indent=1) + "\n")
    return 1 if failed else 0


def _facts(result: Result) -> dict[str, Any]:
    return {
        "world": result.world._asdict(),
        "states": result.states,
        "transitions": result.transitions,
        "exhausted": result.exhausted,
        "walks": result.walks,
        "ends": result.ends,
        "seconds": round(result.seconds, 2),
        "fault": result.fault,
        "trace": result.trace,
    }


def _world(text: str) -> World:
    given = json.loads(text)
    lists = {name: value for name, value in given.items() if isinstance(value, list)}
    return World(**{**given, **{name: _tuples(value) for name, value in lists.items()}})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value


def _show(world: World, trace: list[int]) -> int:
    """Print a trace. Returns 1 if it ends in a fault."""
    try:
        for event, on_the_way in replay(world, trace):
            print(f"  {event}")
            for line in on_the_way:
                print(f"      {line}")
    except Broken as broken:
        print(f"  FAULT: {broken}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
