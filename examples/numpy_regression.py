"""Data-parallel training without PyTorch: each rank fits a plane to its own points; gradients are averaged.

tenfold run -n 4 examples/numpy_regression.py
"""

import argparse

import numpy
import tenfold


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=200)
    options = parser.parse_args()
    truth = numpy.array([2.0, -3.0, 0.5])  # two slopes and an intercept

    with tenfold.init() as group:
        random = numpy.random.default_rng(seed=group.rank)
        inputs = numpy.column_stack([random.normal(size=(1000, 2)), numpy.ones(1000)])
        targets = inputs @ truth + random.normal(scale=0.1, size=1000)

        weights = random.normal(size=3)
        group.broadcast(weights, root=0)  # all ranks start with the values of rank 0
        for epoch in range(options.epochs):
            errors = inputs @ weights - targets
            gradient = inputs.T @ errors / len(errors)
            group.all_reduce(gradient, op="avg")
            weights -= 0.1 * gradient
            if group.rank == 0 and epoch % 50 == 0:
                print(f"epoch {epoch:3}: loss {numpy.mean(errors**2):.4f}")

        everywhere = group.all_gather_object(weights.tobytes())
        assert len(set(everywhere)) == 1, "replicas differ"
        if group.rank == 0:
            print(f"found {weights.round(2)}, which is {truth}; {group.size} replicas agree to the last bit")


if __name__ == "__main__":
    main()
