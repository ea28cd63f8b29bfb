"""Prints digests of low-rank arithmetic on fixed matrices: run in processes with other kernels and threads."""

import sys

import torch
import xxhash

from atoll.compress.lowrank import exact_matmul, first_directions, orthonormal_rows


def main(threads: int) -> None:
    torch.set_num_threads(threads)
    for rank, length in ((1, 5), (16, 300), (48, 4097)):
        left = orthonormal_rows(first_directions(rank, length))
        product = exact_matmul(left.T, first_directions(rank, 700))
        plain = left.T @ first_directions(rank, 700)
        for tensor in (left, product, plain):
            print(xxhash.xxh3_128_hexdigest(tensor.contiguous().numpy().tobytes()))


if __name__ == "__main__":
    main(int(sys.argv[1]))
