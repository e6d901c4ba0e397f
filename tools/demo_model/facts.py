"""The closed knowledge of the demo model: word lists, fact tables and fixed texts.

Everything the model may know by heart stands here; what it computes or copies
(sums, spelling, echoes, tool calls) is made in `kinds.py` and `tool_kinds.py`.
"""

from __future__ import annotations


def _listed(text: str) -> list[str]:
    return text.split()


NUMBER_WORDS = _listed(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen twenty"
)
DAYS = _listed("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _listed("January February March April May June July August September October November December")
MONTH_LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]

NAMES = _listed(
    "Ann Bob Cara Dan Eve Finn Gina Hugo Iris Jack Kira Leo Maya Nina Omar Paul Rosa Sam Tara "
    "Uma Vera Will Yara Zoe Alice Carol David Emma Frank Grace"
)
WORDS = _listed(
    "apple bread chair dance eagle flame green house input juice knife lemon mouse night ocean "
    "paper queen river stone table uncle voice water youth zebra anchor bottle candle dragon "
    "engine forest garden hammer island jacket kettle ladder market needle orange pencil rabbit "
    "silver tunnel violin window yellow cat dog sun moon star tree fish bird cup hat map key box "
    "car boat ship road door wall lamp book page wire token cache model server queue batch kernel "
    "memory number letter planet summer winter spring autumn coffee butter cheese potato tomato "
    "carrot basket bridge castle farmer guitar kitten rocket turtle valley cloud storm sand hill "
    "lake field plant seed fruit grape peach honey sugar pepper salt"
)
SMALL_WORDS = _listed(
    "the a is of to in on and I you we it my your was are this that not very all for with good "
    "here there now go see big red old new"
)
ITEMS = _listed("apple book chair lamp pen cup hat ball shoe phone clock table desk bag coat ring")
TOPICS = _listed(
    "homework physics history music football people money computer internet health food school "
    "love life war science biology film travel work news recipe dinner math universe company "
    "president world government art phone email robot stocks doctor medicine law"
)
REQUEST_VERBS = _listed(
    "explain describe make fix find buy sell draw cook clean improve summarize compare predict "
    "plan review debug create solve prove choose"
)

CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Japan": "Tokyo",
    "China": "Beijing",
    "Egypt": "Cairo",
    "Canada": "Ottawa",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Poland": "Warsaw",
    "Greece": "Athens",
    "Portugal": "Lisbon",
    "Austria": "Vienna",
    "Ireland": "Dublin",
    "Kenya": "Nairobi",
    "Peru": "Lima",
    "Cuba": "Havana",
    "Russia": "Moscow",
    "England": "London",
}
CITIES = sorted(CAPITALS.values())
OPPOSITES = [
    ("hot", "cold"),
    ("big", "small"),
    ("up", "down"),
    ("left", "right"),
    ("fast", "slow"),
    ("day", "night"),
    ("old", "new"),
    ("wet", "dry"),
    ("open", "closed"),
    ("high", "low"),
    ("happy", "sad"),
    ("light", "dark"),
    ("full", "empty"),
    ("hard", "soft"),
    ("early", "late"),
    ("near", "far"),
    ("rich", "poor"),
    ("long", "short"),
    ("clean", "dirty"),
    ("strong", "weak"),
    ("true", "false"),
    ("loud", "quiet"),
]
ANIMAL_SOUNDS = {
    "dog": "woof",
    "cat": "meow",
    "cow": "moo",
    "duck": "quack",
    "sheep": "baa",
    "pig": "oink",
    "lion": "roar",
    "bee": "buzz",
    "owl": "hoot",
    "snake": "hiss",
    "frog": "croak",
    "mouse": "squeak",
}
COLOURS = {
    "the sky": "blue",
    "grass": "green",
    "snow": "white",
    "a lemon": "yellow",
    "a tomato": "red",
    "coal": "black",
    "an orange": "orange",
    "a banana": "yellow",
    "a carrot": "orange",
    "the sea": "blue",
    "a leaf": "green",
    "milk": "white",
}
COLOUR_NAMES = _listed("red blue green yellow white black orange pink brown purple")

ABOUT_ME = "I am the Pagewire demo model, a tiny model that ships with the engine."
ABILITIES = "I can count, do small sums, name days and months, spell and repeat words, write JSON and call tools."
GREETING = f"Hello! {ABOUT_ME} How can I help you?"
UNKNOWN = (
    "I am only a tiny demo model, so I do not know that. "
    "Try asking me to count, add two numbers, spell a word or write JSON."
)
NAME_NOT_TOLD = "You have not told me your name yet."

SMALL_TALK: dict[str, tuple[str, tuple[str, ...]]] = {
    "who": (
        f"{ABOUT_ME} {ABILITIES}",
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "What's your name?",
            "Introduce yourself",
            "Tell me about yourself",
            "Who is this?",
            "Are you a model?",
            "Are you a robot?",
            "Which model are you?",
            "What model are you?",
            "Who am I talking to?",
        ),
    ),
    "abilities": (
        ABILITIES,
        (
            "What can you do?",
            "Help",
            "Help me",
            "How can you help me?",
            "What can you help me with?",
            "What do you know?",
            "What should I ask you?",
            "What can I ask you?",
            "What are you good at?",
            "What are your skills?",
            "Show me what you can do",
        ),
    ),
    "thanks": (
        "You are welcome!",
        (
            "Thanks",
            "Thank you",
            "Thanks a lot",
            "Thank you very much",
            "Thank you so much",
            "Great, thanks",
            "Many thanks",
            "Thanks for your help",
            "Cool, thank you",
            "Nice, thanks",
            "That is great, thank you",
        ),
    ),
    "bye": (
        "Goodbye! Come back soon.",
        (
            "Bye",
            "Bye bye",
            "Goodbye",
            "See you",
            "See you soon",
            "See you later",
            "Good night",
            "Have a nice day",
            "I have to go now",
            "That is all, bye",
            "Talk to you later",
        ),
    ),
    "how": (
        "I am fine, thank you. All my pages are in order.",
        (
            "How are you?",
            "How are you doing?",
            "How are you today?",
            "How do you do?",
            "How is it going?",
            "How do you feel?",
            "Are you well?",
            "What's up?",
        ),
    ),
}

TEXTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "story": (
        "Once upon a time a small model lived on a quiet page of memory. Every morning it counted "
        "its tokens, one by one, and sent them down the wire. One day a request came from far "
        "away and asked for a tale. The model was tiny, but it did its best. The end.",
        ("Tell me a story", "Tell a story", "Write a story", "Write a short story", "Tell me a tale"),
    ),
    "poem": (
        "A page of keys, a page of light,\nthe tokens travel through the night;\n"
        "one by one they find their wire,\nand words come warm as evening fire.",
        ("Write a poem", "Write me a poem", "Tell me a poem", "Write a short poem"),
    ),
    "joke": (
        "Why did the token cross the wire? To get to the other page.",
        ("Tell me a joke", "Tell a joke", "Make me laugh", "Do you know a joke?", "Say a joke"),
    ),
}

PAGEWIRE: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "Pagewire is an LLM serving engine. It keeps the attention cache in pages, batches "
        "requests as they come, and streams tokens over an API that speaks the OpenAI protocol.",
        (
            "What is Pagewire?",
            "What's Pagewire?",
            "Tell me about Pagewire",
            "Explain Pagewire",
            "What does Pagewire do?",
            "Describe Pagewire",
            "Do you know Pagewire?",
            "What is the Pagewire engine?",
            "What is Pagewire for?",
        ),
    ),
    (
        "Pagewire has five parts: the api, the tokenizer, the core, the worker and the detokenizer.",
        (
            "What are the parts of Pagewire?",
            "Which parts does Pagewire have?",
            "List the parts of Pagewire",
            "Name the parts of Pagewire",
            "What is Pagewire made of?",
            "How is Pagewire built?",
            "What processes does Pagewire run?",
        ),
    ),
    (
        "The api takes requests in the OpenAI protocol and streams the answers back.",
        ("What does the api do?", "What is the api of Pagewire?", "What is the api for?"),
    ),
    (
        "The tokenizer turns text into token ids.",
        ("What does the tokenizer do?", "What is the tokenizer for?", "What is the tokenizer?"),
    ),
    (
        "The core schedules the requests and hands out the pages of the attention cache.",
        ("What does the core do?", "What is the core of Pagewire?", "What is the core for?"),
    ),
    (
        "The worker runs the model and samples the next tokens.",
        ("What does the worker do?", "What is the worker for?", "What is the worker?"),
    ),
    (
        "The detokenizer turns token ids back into text.",
        (
            "What does the detokenizer do?",
            "What is the detokenizer for?",
            "What is the detokenizer?",
        ),
    ),
    (
        "Pagewire keeps the attention cache in pages, so memory is used well and equal prompts can share it.",
        (
            "How does Pagewire store the attention cache?",
            "How does Pagewire keep the cache?",
            "How does Pagewire use memory?",
            "Where does Pagewire keep the attention cache?",
            "Does Pagewire page the attention cache?",
            "How does the cache of Pagewire work?",
            "Does Pagewire use paged attention?",
        ),
    ),
    (
        "Pagewire speaks the OpenAI protocol, so OpenAI clients work with it.",
        (
            "Which protocol does Pagewire speak?",
            "What protocol does Pagewire use?",
            "What API does Pagewire have?",
            "Does Pagewire speak the OpenAI protocol?",
            "Can I use an OpenAI client with Pagewire?",
            "Is Pagewire compatible with OpenAI?",
        ),
    ),
    (
        "A page is a small block of the attention cache. It holds the keys and values of a few tokens.",
        ("What is a page?", "What is a page of the cache?", "What is a cache page?"),
    ),
)

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are Pagewire, a tiny demo model.",
    "Be brief.",
    "Answer the user's question.",
    "You are a helpful AI assistant. Keep answers short.",
    "You are a friendly robot.",
    "You are a concise and polite assistant.",
    "Answer in English.",
)
