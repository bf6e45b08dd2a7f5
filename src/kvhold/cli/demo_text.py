"""What the demo asks: its own text, or the user's, as the prompt that the model was trained on."""

QUESTION = "What is the name of the goat?"
QUESTION_FOR_ANY_TEXT = "What is this text about? Answer in one sentence."

TEXT = """\
From the log of the light on Gannet Rock, kept by Halvard Brandt

4 October. Took over the light from old Pettersen, who has kept it for nineteen years and did not once look back from
the boat. He leaves me forty barrels of oil, two goats, a broken chair and a list of everything on the island that
leaks. The lamp is in good order. The lens was cleaned before I came and I have cleaned it again, because a man should
know his own glass. Wind south-west, moderate. Lit at ten minutes past five.

9 October. The first real gale. The whole tower hums like a bottle when you blow across its neck, and the hum goes up
by a tone whenever a gust comes. By midnight I could tell the strength of the wind from my bed. Spray reached the
gallery, which stands thirty-one metres above the rock. One goat got into the store and ate most of a sack of barley
meal. I have named her Justice, because she is blind to reason and cannot be turned away.

15 October. The supply boat came with flour, coffee, lamp wicks and the newspapers of three weeks. I read them in the
order in which they were printed, one a day, so that the world arrives here at its proper speed. The boatman, Anders
Lind, says that the herring are late and that the harbour is full of men with nothing to do but have opinions. He will
come again in a fortnight if the sea allows it.

23 October. Fog for the third day. The bell is worked by a clockwork that must be wound every four hours, and so I sleep
like a ship's dog, in pieces. In fog the light is of no use to anybody; it makes a white room around the tower, and I
sit in the middle of it and listen. This morning a steamer answered the bell with her whistle, quite near, and then
again from farther away. I never saw her. I wrote her into the book all the same.

2 November. Mended the chair. Found that the leak over the stairs is not a leak at all, but the cistern sweating.
Crossed it off Pettersen's list with some satisfaction and wrote under it a leak of my own discovery. Clear and cold at
night. I counted the lights of eleven fishing boats to the east, in a row like beads.

12 November. A bad night, and I will set it down in order. At a quarter to two in the morning I saw a blue flare to the
north, where nobody has any business to be, and then a second one. It was the schooner Margarethe, with timber from
Sundsvall, and she had run onto the reef with her foremast gone. The sea was too high for my boat. I fired the signal
gun so that the pilots on the mainland should know, and then I did the only other thing that I could think of: I hung
the two big storm lanterns in a line down the north stairs, to show them the one gap in the rocks where a boat can come
in. They saw it. Six men and a boy came through in their own boat before she broke up, and the last of them had the
ship's cat inside his shirt. I had them all in the kitchen by four o'clock with every blanket in the house.

13 November. The captain, whose name is Elias Kron, slept for eleven hours and then asked for a pencil and wrote down
what he owed me in coffee. The boy is fourteen and it was his first voyage. He followed me up to the lamp in the evening
and asked so many questions that I let him trim the wick. He did it well. The cat and Justice have looked at each other
and come to some agreement.

16 November. The pilot cutter took my guests off. The kitchen is very quiet. The captain left me his barometer, the only
thing he had carried out of the ship besides her papers. I have hung it beside my own. They differ by two millimetres,
and I find that I believe his.

29 November. Nothing but rain. Painted the inside of the oil store. Anders Lind brought a letter from the company, which
regrets the use of four blankets and wishes to know why the signal gun was fired seven times when the regulations allow
for three. I have answered that I was counting men, not shots.

11 December. Ice on the gallery rail as thick as my wrist, and I broke it off with a mallet before it could break the
rail. Geese went over all day towards the south, talking. In the evening the air was so clear that I saw the light on
Varn Point, which is twenty-six miles away, turn on its heel every thirty seconds. We are not supposed to be in sight of
each other. I dipped a lantern three times, like a fool, and like another fool he answered.

24 December. Coffee from Captain Kron, four pounds of it, and with it a drawing by the boy: the tower, the stairs with
the two lanterns, and a goat as large as the house. I have put it up in the lamp room, where the heat will not reach it.
Wind north, light. Lit at half past three. All well.
"""


def make_prompt(text: str, question: str) -> str:
    """``text`` and then ``question`` as one turn of a chat, with the answer to come."""
    return f"<|im_start|>user\n{text.strip()}\n\n{question.strip()}<|im_end|>\n<|im_start|>assistant\n"
