"""`python -m benchmarks`: all of them."""

from benchmarks.throughput import main

if __name__ == "__main__":
    main()
