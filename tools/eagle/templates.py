# ruff: noqa: E501
"""Prompts written by hand: topics times tasks, code tasks, story seeds, system prompts and follow-up questions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

__all__ = ["FOLLOW_UPS", "SYSTEM_PROMPTS", "template_prompts"]

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a concise assistant. Answer in at most three sentences.",
    "You are an experienced Python developer. Give working code and explain it briefly.",
    "You are a patient teacher who explains things to children.",
    "You are a creative writer with a vivid imagination.",
    "Answer in bullet points.",
    "You are a customer support agent for an online shop. Be polite and solve the problem.",
    "You are a doctor's assistant. Give general information and recommend seeing a professional when needed.",
    "You are an expert historian. Give dates and context.",
    "You are a chef who loves sharing recipes.",
    "You are a travel guide.",
    "You are a data analyst. Structure your answer with headings.",
    "You translate and edit text. Keep the meaning.",
    "Think step by step, then give the final answer on its own line.",
    "You are a friendly chatbot. Keep the conversation going.",
    "You are a technical writer. Use precise and simple language.",
)

FOLLOW_UPS = (
    "Can you give me an example?",
    "Explain that in simpler terms.",
    "Make it shorter.",
    "Can you tell me more about that?",
    "Why is that?",
    "Rewrite your answer as a list of bullet points.",
    "Summarize your answer in one sentence.",
    "What are the disadvantages?",
    "Are you sure? Please double-check your answer.",
    "Turn this into a short poem.",
    "How would I do this step by step?",
    "What else should I know about this?",
    "Can you write this as an email to a colleague?",
    "Thanks! What would you recommend for a beginner?",
    "Translate your answer into Spanish.",
    "Write some Python code that illustrates this.",
    "Compare this with the alternatives.",
    "What questions could be asked about this in an exam?",
)

_TOPICS = (
    "photosynthesis", "the water cycle", "black holes", "the French Revolution", "machine learning", "neural networks",
    "climate change", "renewable energy", "the stock market", "inflation", "blockchain", "quantum computing",
    "the immune system", "vaccines", "DNA", "evolution", "plate tectonics", "volcanoes", "the solar system", "gravity",
    "electricity", "magnetism", "the Roman Empire", "World War II", "the Cold War", "the Renaissance", "democracy",
    "human rights", "supply and demand", "compound interest", "personal budgeting", "time management", "public speaking",
    "meditation", "healthy eating", "strength training", "running a marathon", "sleep", "stress management", "gardening",
    "baking bread", "Italian cooking", "vegetarian meals", "coffee", "tea", "wine", "photography", "oil painting",
    "learning the guitar", "jazz", "classical music", "Shakespeare", "science fiction", "writing a novel", "poetry",
    "job interviews", "writing a resume", "remote work", "leadership", "team building", "project management",
    "starting a business", "marketing on social media", "search engine optimization", "customer service", "negotiation",
    "operating systems", "databases", "SQL joins", "REST APIs", "HTTP", "encryption", "passwords", "recursion",
    "sorting algorithms", "binary search", "hash tables", "linked lists", "object-oriented programming",
    "functional programming", "unit testing", "version control with Git", "Docker containers", "cloud computing",
    "artificial intelligence in medicine", "self-driving cars", "3D printing", "space exploration", "the Moon landing",
    "dinosaurs", "whales", "bees", "dogs", "cats", "rainforests", "deserts", "the ocean", "rivers", "mountains", "Paris",
    "Tokyo", "Kenya", "Brazil", "Australia", "camping", "hiking", "bicycles", "chess", "football", "basketball", "yoga",
    "parenting", "friendship", "grief", "happiness", "ethics", "stoicism", "Buddhism", "mythology", "languages",
    "grammar", "fractions", "algebra", "probability", "statistics", "geometry", "calculus", "prime numbers", "the atom",
    "chemical reactions", "acids and bases", "water pollution", "recycling", "electric cars", "trains", "airplanes",
    "bridges", "architecture", "fashion", "movies", "video games", "board games", "holidays", "weddings", "moving house",
    "buying a car", "insurance", "taxes", "retirement", "education", "homework", "libraries", "museums", "journalism",
    "the internet", "smartphones", "privacy", "email etiquette", "email marketing", "first aid", "allergies", "diabetes",
    "heart disease", "mental health", "teeth", "the brain", "memory", "the eye", "blood", "bones", "weather", "snow",
)  # fmt: skip

_TOPIC_TASKS = (
    "Explain {} in simple terms.",
    "Write a short essay about {}.",
    "Give me five interesting facts about {}.",
    "What are the most common misconceptions about {}?",
    "Write a blog post introduction about {}.",
    "How can I learn more about {}? Give me a plan for one month.",
    "Write a dialogue between a teacher and a student about {}.",
    "Summarize the history of {}.",
    "List the pros and cons of {}.",
    "Write a poem about {}.",
    "Create a quiz with five questions and answers about {}.",
    "Why is {} important?",
    "Write a tweet about {}.",
    "Give me ten ideas for an article about {}.",
)

_CODE_TASKS = (
    "reverses a string", "checks whether a number is prime", "computes the factorial of a number", "merges two sorted lists",
    "finds the longest word in a sentence", "counts the vowels in a string", "sorts a list of dictionaries by a key",
    "reads a CSV file and prints the average of a column", "removes duplicates from a list", "checks for palindromes",
    "computes the Fibonacci sequence", "finds the greatest common divisor", "flattens a nested list",
    "validates an email address", "converts Celsius to Fahrenheit", "implements a stack", "implements a queue",
    "performs a binary search", "implements bubble sort", "implements quicksort", "counts word frequencies in a file",
    "generates a random password", "finds all anagrams in a list of words", "transposes a matrix", "multiplies two matrices",
    "downloads a web page and prints its title", "parses a JSON string", "connects to a SQLite database",
    "calculates the distance between two points", "checks whether parentheses are balanced", "rotates a list by k places",
    "finds the second largest number", "converts a number to binary", "converts Roman numerals to integers",
    "simulates rolling two dice", "prints a multiplication table", "computes the mode of a list", "zips two lists together",
    "finds the missing number in a sequence", "implements a linked list", "traverses a binary tree", "caches results",
    "retries a request three times", "renames all files in a folder", "draws a bar chart", "formats a date",
)  # fmt: skip
_CODE_FORMS = (
    "Write a Python function that {}.",
    "Write a JavaScript function that {}.",
    "Write a C++ program that {}.",
    "Write a Java method that {}.",
    "How do I write code that {}? Explain each step.",
    "Write a Python function that {}, with type hints, a docstring and unit tests.",
)

_HEROES = (
    "a lonely lighthouse keeper", "a talking cat", "a young inventor", "a retired detective", "a dragon afraid of fire",
    "two sisters", "a robot gardener", "a lost astronaut", "a baker", "a ghost", "a shy wizard", "an old sailor",
)  # fmt: skip
_PLACES = (
    "on a distant planet", "in a small village", "in a haunted library", "at the bottom of the sea", "in New York in 1920",
    "during a snowstorm", "on a train that never stops", "in a world without colors",
)  # fmt: skip
_GENRES = ("short story", "fairy tale", "mystery", "funny story", "poem", "movie scene")

_LETTERS = (
    "apologizing for a late delivery", "asking for a day off", "inviting colleagues to a birthday party",
    "thanking a teacher", "complaining about a broken product", "applying for a job as a nurse", "quitting a job",
    "asking a professor for a recommendation", "announcing a new product", "welcoming a new employee",
    "reminding a customer about an unpaid invoice", "congratulating a friend on a new baby", "declining an offer politely",
    "asking a landlord to repair the heating", "introducing yourself to a new team", "planning a family reunion",
)  # fmt: skip
_TONES = ("a formal email", "a friendly message", "a short letter", "an enthusiastic email")


def template_prompts() -> Iterator[tuple[str, str]]:
    """Every hand-written prompt as (source, text), in a fixed order."""
    for task, topic in itertools.product(_TOPIC_TASKS, _TOPICS):
        yield "topics", task.format(topic)
    for form, task in itertools.product(_CODE_FORMS, _CODE_TASKS):
        yield "code", form.format(task)
    for genre, hero, place in itertools.product(_GENRES, _HEROES, _PLACES):
        yield "stories", f"Write a {genre} about {hero} {place}."
    for tone, purpose in itertools.product(_TONES, _LETTERS):
        yield "letters", f"Write {tone} {purpose}."
