"""Workers that are actors of Ray, on one machine or on many (`sharded_loader.ray.pool`).

For: jobs whose data has to be read by more machines than those with the devices.
Costs: about 780 lines. The core asks for `RayPool` by name.
Tests: tests/pools/ray; `make test-ray` with Ray.
It goes when: Ray is not how programs use several machines any more.
"""
