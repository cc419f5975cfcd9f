"""Workers that are actors of Ray, on one machine or on many (`sharded_loader.ray.pool`)."""
