"""How a change of prompt shows: the mean colour of the picture, before and after, chunk by chunk.

What is made already stays as it is; the new prompt holds from the next chunk on, and no chunk mixes the two.
"""

import streamdiff

PROMPTS = ("a red circle over a meadow", "a blue square at night", "a yellow star in the desert")
FRAMES_EACH = 36

with streamdiff.open(PROMPTS[0], seed=3) as session:
    waiting = list(PROMPTS[1:])
    for number, frame in enumerate(session):
        if number % FRAMES_EACH == 0 and number:
            if not waiting:
                break
            remark = session.set_prompt(waiting.pop(0))
            print(f"frame {number}: the prompt is now {session.text!r}. {remark}")
        if number % 12 == 0:
            red, green, blue = frame.reshape(-1, 3).mean(axis=0)
            print(f"frame {number:3}: mean colour red {red:3.0f} green {green:3.0f} blue {blue:3.0f}")
