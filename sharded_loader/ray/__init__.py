"""Workers as Ray actors, on one machine or on many (`sharded_loader.ray.pool`).

For: jobs whose data must be read by more machines than those with the devices.
Costs: about 670 lines. The core imports `RayPool` by name.
Tests: tests/pools/ray; `make test-ray` with Ray.
It goes when: programs no longer use Ray for several machines.
"""
