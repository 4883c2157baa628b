"""Sessions and their life: what was asked, what was accepted, what is shown when.

Knows nothing about codecs, HTTP or peers. Importing this package (bridge, messages, pacing, supervisor) never imports
torch; only `engine.engine` does, in the process that computes.
"""
