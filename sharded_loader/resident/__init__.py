"""Rows of arrays that stay on the devices, which then gather batches without workers: ``resident=`` of a `Placement`.

For: data that fits into the memory of the device, or a large part of it.
Costs: one module of about 200 lines. The core asks for it by name where it is given.
Tests: tests/resident, and tests/gpu where there is one.
It goes when: reading rows from host memory is as fast as gathering them on a device.
"""
