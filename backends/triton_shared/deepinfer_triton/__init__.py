"""Portable Triton kernels of the contract's ops, shared by the drivers of NVIDIA and Ascend devices.

Importing this package imports no Triton. A driver imports the module of an op group (`deepinfer_triton.norm`,
`deepinfer_triton.codec`, ...) when it builds its ops: those modules do.

Each file is one concept: the kernel, the function that chooses its configuration, and the host function that launches
it. A file named after a group of the contract holds the class that a driver registers. `registry` lists every
configuration that can be chosen at run time, for the checks that compile or lower them without a device.

Rules that keep a row's bits independent of its batch (repeatability level R2):

* a kernel's form depends on widths and dtypes alone, never on the number of rows, strides or addresses (`jit`);
* no atomics; sums over a row are one tree, or a fixed number of pieces that are added in ascending order;
* rows whose address would change how they are read are copied first (`rows.aligned`).
"""

from __future__ import annotations
