"""A hundred things that people type, and what each shows: first prompts, and changes of a picture of one or two things.

Each is written out as the sentence that the model is given.
"""

from __future__ import annotations

import pytest

from streamdiff.models.tiny import prompts

FIRST = """
a red ball bouncing = a red circle bouncing over a meadow
blue star = a blue star moving right over a meadow
Show me a purple heart spinning slowly at night = a purple heart spinning slowly over a meadow at night
a cat chasing a mouse = a red heart moving right and a blue heart moving left over a meadow
two birds flying over the ocean = a red triangle moving right and a blue triangle moving right over the sea
a small green square in the rain = a small green square moving right over a meadow in the rain
a ship on a stormy sea = a red triangle moving right over the sea in the rain
the sun rising over the sea = a yellow circle moving up over the sea
snowy city at night = a red circle moving right in the city at night in the snow
a rocket taking off into space = a red triangle moving up in the sky
yellow triangle going up fast, camera pans right = a yellow triangle moving up fast over a meadow, camera panning right
a BIG RED HEART!!! = a red heart moving right over a meadow
a tiny white star falls in the desert = a small white star moving down in the desert
Two purple stars jumping in the city = a purple star bouncing and a purple star bouncing in the city
a red circle and a blue square = a red circle moving right and a blue square moving left over a meadow
green and yellow hearts floating up = a green heart moving up and a yellow heart moving up over a meadow
an orange ball rolling left on the grass = an orange circle moving left over a meadow
a car driving through the city at night in the rain = a red square moving right in the city at night in the rain
a sunset = a red circle moving right over a meadow at dusk
a pink elephant dancing = a red square bouncing over a meadow
a black cat on the beach = a purple heart moving right in the desert
a hot air balloon over the hills at sunrise = a red circle moving right over a meadow at dawn
leaves falling in autumn = a red star moving down and a blue star moving down over a meadow in the wind
a plane gliding left in the sky, the camera pans left = a red triangle moving left in the sky, camera panning left
a still triangle = a red triangle standing still over a meadow
a square that spins = a red square spinning over a meadow
a star which is falling quickly at midnight = a red star moving down fast over a meadow at night
I want a white square, please = a white square moving right over a meadow
can you draw a yellow star moving upwards? = a yellow star moving up over a meadow
a kite in the wind = a red triangle moving right over a meadow in the wind
a yellow sun and a white cloud = a yellow circle moving right and a white circle moving left over a meadow
a red sqaure spining fsat at nihgt = a red square spinning fast over a meadow at night
bleu hart in teh dessert = a blue heart moving right in the desert
a red crcle moveing rigth = a red circle moving right over a meadow
time lapse of a city with a white circle = a white circle moving right in the city as day turns into night
a circle moving from right to left = a red circle moving left over a meadow
a circle moves left while a star moves right = a red circle moving left and a blue star moving right over a meadow
snow falling on a city at dusk = a red circle moving right in the city at dusk in the snow
a slow circle and a fast heart = a red circle moving right slowly and a blue heart moving left fast over a meadow
a spinning green heart, a bouncing yellow ball = a green heart spinning and a yellow circle bouncing over a meadow
a ball going up and down = a red circle bouncing over a meadow
a light blue star over a green meadow = a blue star moving right over a meadow
"""
ONE = "a green triangle moving left over the sea in the rain"
ON_ONE = """
make it blue = a blue triangle moving left over the sea in the rain
make it smaller = a small green triangle moving left over the sea in the rain
faster = a green triangle moving left fast over the sea in the rain
much slower = a green triangle moving left slowly over the sea in the rain
not so fast = a green triangle moving left slowly over the sea in the rain
now at night = a green triangle moving left over the sea at night in the rain
now in the city = a green triangle moving left in the city in the rain
back to the meadow = a green triangle moving left over a meadow in the rain
let it snow = a green triangle moving left over the sea in the snow
stop the rain = a green triangle moving left over the sea
no snow = a green triangle moving left over the sea in the rain
make it spin = a green triangle spinning over the sea in the rain
don't move = a green triangle standing still over the sea in the rain
stay there = a green triangle standing still over the sea in the rain
go up = a green triangle moving up over the sea in the rain
turn around = a green triangle moving right over the sea in the rain
move the other way = a green triangle moving right over the sea in the rain
pan the camera to the left = a green triangle moving left over the sea in the rain, camera panning left
move the camera to the right = a green triangle moving left over the sea in the rain, camera panning right
turn it into a square = a green square moving left over the sea in the rain
a star instead of the triangle = a green star moving left over the sea in the rain
replace the triangle with a heart = a green heart moving left over the sea in the rain
make the triangle a circle = a green circle moving left over the sea in the rain
make the green triangle orange = an orange triangle moving left over the sea in the rain
add a heart = a green triangle moving left and a red heart moving right over the sea in the rain
make both faster = a green triangle moving left fast over the sea in the rain
in the morning = a green triangle moving left over the sea at dawn in the rain
sunny = a green triangle moving left over the sea
darker = a green triangle moving left over the sea at night in the rain
bigger and faster = a green triangle moving left fast over the sea in the rain
now it is night and it snows = a green triangle moving left over the sea at night in the snow
make the sky purple = a green triangle moving left in the sky in the rain
day turns into night = a green triangle moving left over the sea as day turns into night in the rain
"""
TWO = "a red circle moving right and a blue star moving down over the sea"
ON_TWO = """
slower = a red circle moving right slowly and a blue star moving down slowly over the sea
make both faster = a red circle moving right fast and a blue star moving down fast over the sea
make the star bigger and green = a red circle moving right and a green star moving down over the sea
make the circle small = a small red circle moving right and a blue star moving down over the sea
make the star spin and the circle fall = a red circle moving down and a blue star spinning over the sea
make the blue one red = a red circle moving right and a red star moving down over the sea
make the flower white and the circel slow = a red circle moving right slowly and a white star moving down over the sea
the red one should be green = a green circle moving right and a blue star moving down over the sea
make the blue star white = a red circle moving right and a white star moving down over the sea
replace the star with a heart = a red circle moving right and a blue heart moving down over the sea
a heart instead of the star = a red circle moving right and a blue heart moving down over the sea
just the star = a blue star moving down over the sea
only one = a red circle moving right over the sea
remove the circle = a blue star moving down over the sea
remove the blue one = a red circle moving right over the sea
the star stops = a red circle moving right and a blue star standing still over the sea
let the circle jump = a red circle bouncing and a blue star moving down over the sea
slow down the star = a red circle moving right and a blue star moving down slowly over the sea
make everything purple = a purple circle moving right and a purple star moving down over the sea
turn them into hearts = a red heart moving right and a blue heart moving down over the sea
turn around = a red circle moving left and a blue star moving up over the sea
it starts raining = a red circle moving right and a blue star moving down over the sea in the rain
in the desert instead = a red circle moving right and a blue star moving down in the desert
make the background a city = a red circle moving right and a blue star moving down in the city
clear sky = a red circle moving right and a blue star moving down over the sea
a green heart flying up over the city = a green heart moving up in the city
"""
TOLD = [
    ("a cat chasing a mouse", None, "“chasing”: I draw it moving right. “mouse”: I draw a blue heart."),
    ("a storm in the park", None, "“storm”: I draw rain. “park”: I draw a meadow."),
    ("a yellow sun and a white cloud", None, "“sun”: I draw a yellow circle. “cloud”: I draw a white circle."),
    ("purple rain", None, "“purple”: only things have a color that can be chosen."),
    ("a red star on the left", None, "“on the left”: I cannot choose where things are"),
    ("the camera follows", ONE, "it follows nothing"),
    ("add a heart", TWO, "I draw two things at most."),
    ("do you know zorgblatts", ONE, "This small model can't draw that (“know”, “zorgblatts”)."),
    ("a red zorgblatt", None, "This small model can't draw “zorgblatt”. It can draw one or two things"),
    ("bleu hart", None, "“bleu”: I read “blue”. “hart”: I read “heart”."),
]  # fmt: skip


def pairs(text: str) -> list[tuple[str, str]]:
    return [(typed, shown) for line in text.strip().splitlines() for typed, shown in [line.split(" = ")]]


SHOWN = ((None, FIRST), (ONE, ON_ONE), (TWO, ON_TWO))
SENTENCES = [(typed, before, shown) for before, text in SHOWN for typed, shown in pairs(text)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "before", "shown"), SENTENCES, ids=[f"{t} ({len(b or '')})" for t, b, _ in SENTENCES]
)
def test_what_a_sentence_shows(typed: str, before: str | None, shown: str) -> None:
    assert prompts.read(typed, before).text == shown


@pytest.mark.parametrize(("typed", "before", "told"), TOLD, ids=[typed for typed, _, _ in TOLD])
def test_what_people_are_told(typed: str, before: str | None, told: str) -> None:
    reading = prompts.read(typed, before)
    assert told in reading.notice
    assert reading.notice.endswith(f"Showing “{reading.text}”.")


def test_common_words_are_not_taken_for_typing_mistakes() -> None:
    for word in ("know", "hand", "stand", "find", "good", "light", "start", "east", "glass", "take"):
        assert not prompts.read_words(word)[0].misspelt, word
