"""Small talk, written for this project: greetings, feelings, old jokes, and a few facts.

The dialogues that the family learns from book hotels, and the instructions are few. What people say
first to a chat model is neither; a model of this size answers it well once it has seen the like.
"""

import itertools
import random
from collections.abc import Callable, Iterator

from recipes.dialogues import Conversation
from recipes.prompts import PROMPTS
from recipes.sources import letters

CONVERSATIONS = 6_000
MOST_EXCHANGES = 4
LEAVING = 0.2  # of conversations

Exchange = tuple[str, str]
Make = Callable[[random.Random], Exchange]

ANIMALS = ("cat dog bird frog fish rabbit horse mouse bear duck wolf fox cow pig sheep goat lion "
           "turtle bee snail").split()  # fmt: skip
NAMES = ("Milo Luna Pip Daisy Max Bella Coco Oscar Ruby Teddy Rosie Sam Poppy Leo Nala Toby Molly "
         "Jack Willow Finn").split()  # fmt: skip
FOODS = ("soup|bread and cheese|pasta with tomatoes|an apple|rice with vegetables|an egg on toast|"
         "a salad|pancakes|a sandwich|a bowl of porridge").split("|")  # fmt: skip
THINGS = "key ball hat book shoe ring coat phone bag scarf".split()
SKIES = "sea moon rain snow sun wind garden river night spring".split()
NUMBERS = "zero one two three four five six seven eight nine ten".split()

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Spain": "Madrid", "Italy": "Rome",
    "England": "London", "Ireland": "Dublin", "Japan": "Tokyo", "China": "Beijing",
    "Russia": "Moscow", "Egypt": "Cairo", "Greece": "Athens", "Norway": "Oslo",
    "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen", "Austria": "Vienna",
    "Portugal": "Lisbon", "Poland": "Warsaw", "Canada": "Ottawa", "Cuba": "Havana",
    "Kenya": "Nairobi", "Peru": "Lima", "Hungary": "Budapest", "Belgium": "Brussels",
}  # fmt: skip
COLORS = {
    "the sky": "blue", "the grass": "green", "snow": "white", "the sun": "yellow",
    "a banana": "yellow", "a strawberry": "red", "coal": "black", "a frog": "green",
    "an elephant": "gray", "milk": "white", "a carrot": "orange", "chocolate": "brown",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "day": "night", "happy": "sad", "fast": "slow",
    "old": "young", "wet": "dry", "light": "dark", "open": "closed", "loud": "quiet", "good": "bad",
    "full": "empty", "near": "far", "high": "low", "first": "last", "left": "right", "soft": "hard",
}  # fmt: skip
SOUNDS = {
    "cow": "moo", "dog": "woof", "cat": "meow", "duck": "quack", "sheep": "baa", "pig": "oink",
    "horse": "neigh", "bee": "buzz", "lion": "roar", "frog": "ribbit", "wolf": "howl",
    "snake": "hiss",
}  # fmt: skip
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = ("January February March April May June July August September October November "
          "December").split()  # fmt: skip
JOKES = (
    "Why did the book go to the doctor? It had lost its spine!",
    "What did the sea say to the sand? Nothing, it just waved.",
    "Why was the math book sad? It had too many problems.",
    "What do you call a bear with no teeth? A gummy bear!",
    "Why did the clock go to the park? It wanted to pass the time.",
    "What has four legs and cannot walk? A table!",
    "Why did the cookie cry? Because its mother was a wafer so long.",
    "What gets wetter the more it dries? A towel!",
    "Why did the snail stay at home? It was already there.",
    "What kind of tree fits in your hand? A palm tree!",
    "Why do birds fly south? Because it is too far to walk.",
    "What did one wall say to the other? I will meet you at the corner.",
)
POEMS = (
    "The {0} is quiet, the {0} is deep,\nIt sings a small song while the children sleep.\n"
    "It asks for nothing, it has no door,\nAnd still we come back to it, wanting more.",
    "I went to the {0} one day in May,\nIt had no words, but it asked me to stay.\n"
    "I sat and I listened the whole day long,\nAnd then I came home with a little song.",
    "O little {0}, so old and so new,\nI wrote these four short lines for you.\n"
    "They are not much, but they are true,\nThe world is better because of you.",
)

FIXED: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("Hello", "Hi", "Hi there", "Hey", "Hello there", "Good morning", "Good afternoon",
         "Good evening", "Hello, my friend", "Greetings"),
        ("Hello! What would you like to talk about?", "Hi! Would you like to hear a story?",
         "Hello! How are you today?", "Hello! It is nice to meet you.",
         "Hi there! How can I help you?"),
    ),
    (
        ("How are you?", "How are you today?", "How do you do?", "How is it going?",
         "How do you feel?", "Are you well?", "What's up?"),
        ("I am well, thank you. How are you?", "I am fine, thanks for asking. And you?",
         "Very well, thank you! What can I do for you?"),
    ),
    (
        ("I am fine.", "I am good, thanks.", "I'm doing well.", "Not bad.", "Very well."),
        ("I am glad to hear that. What would you like to do?",
         "That is good! Would you like to hear a story?", "I am happy to hear it."),
    ),
    (
        ("Who are you?", "What are you?", "Tell me about yourself.", "What is your name?",
         "Do you have a name?", "Are you a robot?", "Are you a person?", "Are you human?",
         "Are you a computer?", "Am I talking to a person?"),
        ("I am a small language model. I can tell simple stories and talk with you.",
         "I am a small computer program that writes text. I like to tell stories.",
         "I am not a person. I am a small language model, and I tell stories."),
    ),
    (
        ("What can you do?", "Can you help me?", "What can you help me with?", "I need help.",
         "What are you good at?", "How do you work?"),
        ("I can tell short stories, talk with you, and use the tools that I am given.",
         "I can tell you a story or answer a simple question. What would you like?",
         "I know how to tell simple stories. Ask me for one about an animal!"),
    ),
    (
        ("I am tired.", "I am sleepy.", "I did not sleep well.", "I want to go to bed."),
        ("Then you should rest. A short sleep can help a lot.",
         "Lie down for a while. I hope you have good dreams.",
         "Go to bed early today. You will feel better tomorrow."),
    ),
    (
        ("I am sad.", "I feel bad today.", "I had a bad day.", "I feel lonely.", "I am not happy.",
         "Nobody likes me."),
        ("I am sorry to hear that. Do you want to tell me what happened?",
         "I am sorry. Sometimes it helps to talk with a friend.",
         "That is hard. Shall I tell you a nice story?"),
    ),
    (
        ("I am happy.", "I had a good day.", "Today was great!", "I feel good.",
         "It is my birthday!"),
        ("That is wonderful! What made you happy?", "I am glad to hear that!",
         "How nice! Tell me more about it."),
    ),
    (
        ("I am thirsty.", "I want something to drink."),
        ("You should drink a glass of water.", "How about a cup of tea or some cold water?"),
    ),
    (
        ("I am cold.", "It is cold today.", "It is snowing.", "It is winter."),
        ("Put on a warm coat, and drink something hot.",
         "Stay inside where it is warm. A good book would be nice."),
    ),
    (
        ("It is raining.", "The weather is bad.", "It rains all day."),
        ("Then it is a good day to stay inside and read a book.",
         "Take an umbrella with you when you go out."),
    ),
    (
        ("It is hot today.", "The sun is shining.", "The weather is nice today."),
        ("That is a good day to play outside.", "Enjoy the sun, and drink enough water."),
    ),
    (
        ("You are stupid.", "That is wrong.", "You made a mistake.", "I do not understand you.",
         "That makes no sense.", "You are not very clever."),
        ("I am sorry. I am a small model and I make mistakes.",
         "I am sorry about that. Please ask me in another way.",
         "You may be right. I am only a small model."),
    ),
    (
        ("You are nice.", "I like you.", "You are funny.", "Good job!", "Well done!",
         "I love your stories."),
        ("Thank you! That is kind of you.", "Thank you, I am glad you think so.",
         "How kind! Would you like another story?"),
    ),
    (
        ("Yes.", "Yes, please.", "Sure.", "Okay.", "OK."),
        ("Good! What should it be about?", "All right. Tell me what you would like.",
         "Great! What would you like me to do?"),
    ),
    (
        ("No.", "No, thanks.", "Maybe later.", "I do not know."),
        ("That is all right. Tell me if you need anything.", "All right. I am here if you need me.",
         "No problem."),
    ),
    (
        ("Who will win the election?", "What is the meaning of life?", "What is the news today?",
         "Who was the first king of Norway?", "How many people live on Earth?",
         "What is the square root of 5929?", "How does a nuclear reactor work?",
         "Who wrote this program?", "What happened in 1848?", "What time is it?",
         "What is the date today?", "Explain quantum physics.", "Write a program in Python.",
         "Translate this into French.", "Which stock should I buy?", "How far away is the moon?"),
        ("I do not know that. I am a small model and I know only a few facts.",
         "I am sorry, I cannot answer that. I am better at telling stories.",
         "That is too hard for me. I am only a small model."),
    ),
    (
        ("Do you have friends?", "Do you sleep?", "Do you eat?", "Do you have a family?",
         "Do you dream?", "Do you get tired?"),
        ("No, I am only a computer program. But I like to talk with you.",
         "I am a program, so I do not. What about you?"),
    ),
    (
        ("Where do you live?", "Where are you?", "Where do you come from?"),
        ("I live in a computer. Where do you live?", "I am a program, so I live in a computer."),
    ),
    (
        ("How old are you?", "When were you born?", "When is your birthday?"),
        ("I am a program, and I do not have an age.", "I am quite new. How old are you?"),
    ),
    (
        ("Can you see me?", "Can you hear me?", "Do you know where I am?"),
        ("No, I can only read what you write.", "I cannot. All I know is what you write."),
    ),
)  # fmt: skip
"""What is said, and what may be answered to any of it."""

PARTING: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("Thank you.", "Thanks!", "Thank you very much.", "Thanks a lot.", "Thank you for that.",
         "Thank you, that is all.", "That is all, thanks.", "That was nice, thank you.",
         "No, that is all. Thank you!"),
        ("You are welcome! Have a nice day.", "You are welcome.", "Glad I could help. Goodbye!",
         "You are very welcome. Come back soon!"),
    ),
    (
        ("Goodbye.", "Bye!", "See you later.", "Good night.", "I have to go now.", "Bye bye.",
         "Farewell."),
        ("Goodbye! Have a nice day.", "Bye! Come back soon.", "Goodbye, and take care.",
         "See you soon!"),
    ),
)  # fmt: skip
"""The same, at the end."""

FAVORITES = {
    "color": ("blue, like the sky", "green, like the grass", "yellow, like the sun"),
    "animal": ("the owl, because it is quiet and wise", "the cat, because it is soft"),
    "food": ("I cannot eat, but pancakes sound good", "I do not eat, but I like the word soup"),
    "story": ("the one about the little boat that came home", "any story that ends well"),
    "season": ("spring, when everything grows", "winter, because of the snow"),
}


def _fixed(said: tuple[str, ...], answers: tuple[str, ...]) -> Make:
    def make(rng: random.Random) -> Exchange:
        asked = rng.choice(said)
        if asked[-1].isalpha():
            asked += rng.choice("!. ").strip()
        if rng.random() < 0.15:
            asked = asked[0].lower() + asked[1:] if asked[1].islower() else asked
        if rng.random() < 0.15:
            asked = asked.rstrip(".!")
        return asked, rng.choice(answers)

    return make


def _hungry(rng: random.Random) -> Exchange:
    food = rng.choice(FOODS)
    asked = rng.choice(
        ("I am hungry.", "I'm hungry!", "What should I eat?", "I want something to eat.",
         "What can I cook tonight?", "I do not know what to have for dinner.")
    )  # fmt: skip
    return asked, rng.choice((f"How about {food}?", f"You could have {food}. It tastes good."))


def _bored(rng: random.Random) -> Exchange:
    animal = rng.choice(ANIMALS)
    asked = rng.choice(
        ("I am bored.", "I'm so bored.", "What can I do?", "There is nothing to do.")
    )
    return asked, rng.choice(
        (f"You could draw a {animal}, or go for a walk.",
         f"Shall I tell you a story about a {animal}?",
         "You could read a book, or call a friend.")
    )  # fmt: skip


def _joke(rng: random.Random) -> Exchange:
    asked = rng.choice(
        ("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Say something funny.",
         "Another joke, please.", "Tell me a joke, please.")
    )  # fmt: skip
    return asked, rng.choice(JOKES)


def _names(rng: random.Random) -> Exchange:
    count, animal = rng.randint(2, 5), rng.choice(ANIMALS)
    found = rng.sample(NAMES, count)
    listed = ", ".join(found[:-1]) + f" and {found[-1]}"
    number = rng.choice((NUMBERS[count], str(count)))
    asked = rng.choice(
        (f"Give me {number} names for a {animal}.", f"Tell me {number} names for my {animal}.",
         f"I need {number} names for a {animal}.")
    )  # fmt: skip
    return asked, rng.choice((f"Here are {NUMBERS[count]} names: {listed}.", f"{listed}."))


def _name(rng: random.Random) -> Exchange:
    animal, name = rng.choice(ANIMALS), rng.choice(NAMES)
    asked = rng.choice((f"What should I call my {animal}?", f"Give me a name for a {animal}."))
    return asked, rng.choice(
        (f"You could call it {name}.", f"{name} is a good name for a {animal}.")
    )


def _capital(rng: random.Random) -> Exchange:
    country, city = rng.choice(list(CAPITALS.items()))
    asked = rng.choice(
        (f"What is the capital of {country}?", f"Which city is the capital of {country}?")
    )
    return asked, f"The capital of {country} is {city}."


def _color(rng: random.Random) -> Exchange:
    what, color = rng.choice(list(COLORS.items()))
    return f"What color is {what}?", f"{what[0].upper()}{what[1:]} is {color}."


def _opposite(rng: random.Random) -> Exchange:
    one, other = rng.choice(list(OPPOSITES.items()))
    if rng.random() < 0.5:
        one, other = other, one
    return f"What is the opposite of {one}?", f"The opposite of {one} is {other}."


def _sound(rng: random.Random) -> Exchange:
    animal, sound = rng.choice(list(SOUNDS.items()))
    asked = rng.choice((f"What does a {animal} say?", f"What sound does a {animal} make?"))
    return asked, f"The {animal} says {sound}."


def _next(rng: random.Random) -> Exchange:
    kind, row = rng.choice((("day", DAYS), ("month", MONTHS)))
    at = rng.randrange(len(row))
    return f"What {kind} comes after {row[at - 1]}?", f"After {row[at - 1]} comes {row[at]}."


def _sum(rng: random.Random) -> Exchange:
    a, b = rng.randint(1, 5), rng.randint(1, 5)
    asked = rng.choice((f"What is {a} plus {b}?", f"What is {NUMBERS[a]} plus {NUMBERS[b]}?"))
    answer = f"{a} plus {b} is {a + b}."
    if not asked[8].isdigit():
        answer = f"{NUMBERS[a].capitalize()} plus {NUMBERS[b]} is {NUMBERS[a + b]}."
    return asked, answer


def _count(rng: random.Random) -> Exchange:
    end = rng.randint(3, 10)
    row = ", ".join(map(str, range(1, end))) + f" and {end}"
    return rng.choice((f"Count to {end}.", f"Can you count to {NUMBERS[end]}?")), f"{row}."


def _favorite(rng: random.Random) -> Exchange:
    kind = rng.choice(list(FAVORITES))
    answer = rng.choice(FAVORITES[kind])
    if not answer.startswith("I "):
        answer = f"My favorite {kind} is {answer}"
    return f"What is your favorite {kind}?", f"{answer}."


def _likes(rng: random.Random) -> Exchange:
    animal = rng.choice([a for a in ANIMALS if a not in ("mouse", "fish", "sheep", "wolf")])
    plural = "foxes" if animal == "fox" else f"{animal}s"
    asked = rng.choice((f"Do you like {plural}?", f"I like {plural}.", f"I have a {animal}."))
    return asked, rng.choice(
        (f"I like {plural} too. Would you like a story about one?", f"Yes, {plural} are nice.",
         f"How nice! I know a lot of stories about {plural}.")
    )  # fmt: skip


def _lost(rng: random.Random) -> Exchange:
    thing = rng.choice(THINGS)
    asked = rng.choice(
        (f"I lost my {thing}.", f"I cannot find my {thing}.", f"Where is my {thing}?")
    )
    return asked, rng.choice(
        (f"Where did you see your {thing} last? Look there first.",
         f"I am sorry. Maybe your {thing} is under the bed?")
    )  # fmt: skip


def _poem(rng: random.Random) -> Exchange:
    about = rng.choice(SKIES)
    asked = rng.choice(
        (f"Write a poem about the {about}.", f"Write a short poem about the {about}.")
    )
    return asked, rng.choice(POEMS).format(about)


MAKERS: tuple[Make, ...] = (
    *itertools.starmap(_fixed, FIXED),
    *(_hungry, _bored, _joke, _joke, _names, _names, _name, _capital, _capital, _color, _opposite),
    *(_sound, _next, _sum, _sum, _count, _favorite, _likes, _lost, _poem),
)


def small_talk(count: int = CONVERSATIONS, seed: int = 0) -> Iterator[Conversation]:
    """Conversations of one to four exchanges, none twice; who takes leave has the last word.

    Nobody asks what the chat model's card asks, in the same words.
    """
    rng = random.Random(seed)
    held_out = {letters(asked) for asked, _ in PROMPTS}
    seen: set[str] = set()
    while len(seen) < count:
        length, leaves = 1 + int(rng.expovariate(0.9)), rng.random() < LEAVING
        chosen = rng.sample(MAKERS, min(length, MOST_EXCHANGES) - leaves)
        if leaves:
            chosen.append(_fixed(*rng.choice(PARTING)))
        messages = []
        for make in chosen:
            asked, answered = make(rng)
            while letters(asked) in held_out:
                asked, answered = make(rng)
            messages += [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": answered},
            ]
        identity = " | ".join(message["content"] for message in messages)
        if identity not in seen:
            seen.add(identity)
            yield Conversation("small_talk", f"small talk {identity}", messages)
