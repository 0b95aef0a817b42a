"""Everything that lies in the data folder: blobs, checkpoints, results, the history of jobs; how it gets there from
other devices, and when it is deleted.
"""
