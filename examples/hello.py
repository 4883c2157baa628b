"""A stream in ten lines: pictures as arrays, and a new prompt while it runs."""

import streamdiff

with streamdiff.open("a red circle moving left over a meadow") as session:
    for number, frame in zip(range(121), session, strict=False):  # frame: numpy uint8 [height, width, 3]
        if number == 40:
            session.set_prompt("a blue star at night")
        if number % 20 == 0:
            print(f"frame {number}: {frame.shape}, mean colour {frame.mean(axis=(0, 1)).round()}")
