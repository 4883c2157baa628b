"""Runs the model as a pipeline of stages: schedules micro-steps, runs them, decodes the finished latents.

Knows nothing about viewers, prompts as text, codecs or HTTP.
"""
