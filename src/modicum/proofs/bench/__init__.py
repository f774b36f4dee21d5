"""What proofs measure with: one training loop, one sweep, one loader of digits, meters, a cache.

A proof states criteria. How a model is trained, which learning rate an arm gets, how bytes and
seconds are counted, stands here once.
"""
