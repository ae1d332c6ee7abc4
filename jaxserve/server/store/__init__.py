"""What a server keeps on disk and finds again after it was killed: files, batches and the results of batches.

Blocking, and safe to call from several threads at once. Knows neither HTTP nor engines; who may see what it is told.
"""
