"""Sessions and their life: what was asked, what was accepted, what is shown when.

Knows nothing about codecs, HTTP or peers. No module of this package imports torch; the pipeline is loaded in the engine
process.
"""
