# SPDX-License-Identifier: Apache-2.0
"""Vocabulary of the second demo model: words for images, named things, videos and views, and spare ids."""

from __future__ import annotations

from tokenprune_demo.scenes import COLORS, LARGE, POSITIONS, TINY, WORDS

# Name of each drawing, and its code point in Noto Color Emoji.
THINGS = {
    name: int(code, 16)
    for name, code in (
        pair.split("=")
        for pair in (
            "dog=1F436 mouse=1F42D hamster=1F439 rabbit=1F430 fox=1F98A bear=1F43B panda=1F43C koala=1F428 tiger=1F42F "
            "lion=1F981 cow=1F42E pig=1F437 frog=1F438 monkey=1F435 chicken=1F414 penguin=1F427 duck=1F986 "
            "eagle=1F985 owl=1F989 wolf=1F43A horse=1F434 unicorn=1F984 bee=1F41D butterfly=1F98B snail=1F40C "
            "ladybug=1F41E ant=1F41C spider=1F577 turtle=1F422 snake=1F40D octopus=1F419 squid=1F991 crab=1F980 "
            "fish=1F41F dolphin=1F42C whale=1F433 shark=1F988 crocodile=1F40A zebra=1F993 elephant=1F418 rhino=1F98F "
            "camel=1F42A giraffe=1F992 kangaroo=1F998 goat=1F410 deer=1F98C rooster=1F413 turkey=1F983 peacock=1F99A "
            "parrot=1F99C swan=1F9A2 flamingo=1F9A9 hedgehog=1F994 cactus=1F335 tree=1F333 palm=1F334 mushroom=1F344 "
            "sunflower=1F33B rose=1F339 tulip=1F337 apple=1F34E pear=1F350 lemon=1F34B banana=1F34C watermelon=1F349 "
            "grapes=1F347 strawberry=1F353 cherries=1F352 pineapple=1F34D coconut=1F965 kiwi=1F95D tomato=1F345 "
            "eggplant=1F346 avocado=1F951 broccoli=1F966 corn=1F33D carrot=1F955 bread=1F35E cheese=1F9C0 egg=1F95A "
            "burger=1F354 fries=1F35F pizza=1F355 sandwich=1F96A taco=1F32E cake=1F370 cookie=1F36A donut=1F369 "
            "candy=1F36C lollipop=1F36D coffee=2615 bicycle=1F6B2 train=1F686 tractor=1F69C truck=1F69A rocket=1F680 "
            "helicopter=1F681 airplane=2708 boat=26F5 anchor=2693 umbrella=2614 clock=23F0 camera=1F4F7 phone=1F4F1 "
            "laptop=1F4BB key=1F511 hammer=1F528 scissors=2702 bulb=1F4A1 candle=1F56F book=1F4D5 guitar=1F3B8 "
            "trumpet=1F3BA violin=1F3BB drum=1F941 balloon=1F388 gift=1F381 crown=1F451 glasses=1F453 shoe=1F45F "
            "dress=1F457 shirt=1F455 sock=1F9E6 glove=1F9E4 ball=26BD trophy=1F3C6 house=1F3E0 tent=26FA castle=1F3F0 "
            "robot=1F916 ghost=1F47B skull=1F480 snowman=26C4 bell=1F514 magnet=1F9F2 basket=1F9FA chair=1FA91"
        ).split()
    )
}
SPECIAL = (
    "<pad> <bos> <eos> <unk> <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|> <|im_start|> <|im_end|>"
).split()
PLAIN = (
    "user assistant system : ? . , ! ; - a an the is are was were there in on at of to and or this image video view "
    "views what which where when how many who color colour digit digits written does do did say says sign left right "
    "upper lower top bottom tiny yes no one two three word words number thing things object shown show shows see seen "
    "first second third fourth fifth sixth last start middle end before after up down move moves moved moving way "
    "direction blink blinks times time came come comes appear appears came disappear change changes changed front back "
    "side camera frame frames count background nothing not only between next above below near same different other "
    "another all each list describe answer with that it its has have from by then now again still ever visible short "
    "long large small big single phrase using or none true false name read text city inside outside behind under over "
    "look looks looking turn turned order event events"
).split()
PLURALS = [f"{k}{'es' if k.endswith('ss') else 's'}" for k in (*LARGE, *TINY)]
PLURALS = ["crosses" if k == "crosss" else k for k in PLURALS]
LATER = ("images", "four", "five", "six", "row", "rows", "column", "columns")
SIZE = 640  # rows of the embedding table


def _all() -> list[str]:
    words = [
        *SPECIAL,
        *PLAIN,
        *COLORS,
        *LARGE,
        *TINY,
        *PLURALS,
        *POSITIONS,
        *map(str, range(10)),
        *WORDS,
        *THINGS,
        *LATER,
    ]
    words = list(dict.fromkeys(words))
    return [*words, *(f"<extra{i}>" for i in range(SIZE - len(words)))]  # spare rows for later words


VOCAB = _all()
ID = {word: i for i, word in enumerate(VOCAB)}
