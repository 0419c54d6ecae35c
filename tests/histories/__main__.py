"""`python -m tests.histories`: play histories, print those that went wrong, and count."""

import argparse
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tests.histories
from tests.histories.history import draw
from tests.histories.player import Verdict, play


def main() -> None:
    """Play what was asked for; exit 1 if anything went wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.histories",
        description=tests.histories.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", default="0-49", metavar="A-B", help="which histories; 0-49")
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="so many side by side; 2")
    parser.add_argument("--keep", action="store_true", help="keep every run directory, not only failed ones")
    parser.add_argument("--show", action="store_true", help="print the histories without playing them")
    args = parser.parse_args()
    first, _, last = args.seeds.partition("-")
    histories = [draw(seed) for seed in range(int(first), int(last or first) + 1)]
    if args.show:
        print("\n\n".join(map(str, histories)))
        return
    root = Path(tempfile.mkdtemp(prefix="histories-"))

    def one(index: int) -> Verdict:
        folder = root / str(histories[index].seed)
        folder.mkdir()
        verdict = play(histories[index], folder)
        if not verdict.problems and not args.keep:
            shutil.rmtree(folder)
        return verdict

    failed: list[int] = []
    with ThreadPoolExecutor(args.at_once) as pool:
        for verdict in pool.map(one, range(len(histories))):
            word = "FAILED" if verdict.problems else "ok"
            happened = f"{verdict.effective} of {len(verdict.history.events)} events took effect"
            print(f"seed {verdict.history.seed}: {word} in {verdict.seconds:.0f} s, {happened}", flush=True)
            if verdict.problems or args.keep:
                print(f"{verdict}\n  kept: {verdict.folder}", flush=True)
            if verdict.problems:
                failed.append(verdict.history.seed)
    if not failed and not args.keep:
        shutil.rmtree(root)
    print(f"{len(histories) - len(failed)} passed, {len(failed)} failed" + (f": {failed}" if failed else ""))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
