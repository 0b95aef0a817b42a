"""Which tensors a prepared model has, how they make one vector, and how that is cut into the buckets and segments that
travel.
"""
