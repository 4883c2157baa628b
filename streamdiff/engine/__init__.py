"""Sessions on top of a pipeline: requests come in, answers and numbered frames go out.

Knows nothing about codecs, HTTP or peers. No module of this package imports torch; the pipeline is loaded in the engine
process.
"""
