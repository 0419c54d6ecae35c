"""A worker that trains: FOLDER MODEL BATCH STEPS."""

import sys

import paceline
from benchmarks import models, ours


def main() -> None:
    """Run the loop that every side times, prepared."""
    folder, name, batch, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    model = models.build(name)
    optimizer = models.optimizer(model)
    loader = models.loader(name, batch=batch, steps=steps, workers=paceline.world_size())
    model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    seconds = models.timed_steps(model, optimizer, loader, steps)
    ours.report(folder, paceline.rank(), seconds=seconds)


if __name__ == "__main__":
    main()
