"""The bytes of an encoded vector: their places in memory and on the wire, and the shorter vectors that some codecs sum
in place of the model's.
"""
