"""The ring: which micro-step runs when, on which stage, and what becomes of it.

Knows nothing about viewers, prompts as text, codecs or HTTP.
"""
