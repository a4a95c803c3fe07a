"""Word lists and facts that the pocket model's skills are built from (plain data, no logic)."""

from __future__ import annotations


def _list(text: str) -> list[str]:
    return text.split()


ADJECTIVES = _list("""
amber ancient autumn bitter blue bold brave bright broken calm clever cold copper coral crimson crystal dark deep
distant dusty eager early empty faint fierce fresh frozen gentle golden grand green happy heavy hidden hollow honest
icy ivory jolly keen late lively lonely lucky mellow misty modest noble olive pale patient plain polar proud purple
quick quiet rapid rough royal rusty scarlet shiny silent silver sleepy
""")

NOUNS = _list("""
anchor arrow badge basket beacon bell bottle bridge bucket candle canyon castle cedar circle cliff cloud comet crown
desert dragon eagle engine falcon feather fern flame forest fossil fountain garden glacier hammer harbor hawk helmet
island jungle kettle ladder lagoon lantern lemon lion maple marble meadow mirror moon mountain needle oasis ocean
orchid otter owl palace panda pebble pepper planet pond prairie
""")

VALUES = _list("""
apple bacon bagel banjo bench berry biscuit blanket bread brush butter button cabin camel camera carpet cello chalk
cherry clock coffee cookie cotton drum fabric fiddle flute garlic ginger guitar hockey honey jacket jelly kite lamp
lettuce magnet mango marker melon mitten muffin napkin noodle onion paddle pancake paper parrot pencil piano pillow
pizza pocket potato pumpkin puzzle rabbit radio ribbon rocket saddle salad sandal scarf shovel spoon sugar table
teapot ticket tiger tomato towel trumpet turtle umbrella velvet violin waffle wagon walnut whistle window yogurt zebra
""")

NAMES = _list("""
Mia Tom Anna Ben Clara David Emma Felix Grace Hugo Iris Jack Kate Leo Lucy Max Nina Oscar Paula Quinn Rosa Sam Tina
Victor Wendy Yara Zoe Adam Bella Carl Diana Eric Fiona George Helen Ivan Julia Kevin Laura Martin
""")

OBJECTS = _list("""
lamp book key ball hat cup coin map rope box ring pen flag drum bag knife plate shoe stone apple letter phone torch
basket
""")

PLACES = _list("""
kitchen garden office garage attic library cellar park market school station bedroom hallway barn museum harbor cafe
bakery
""")

CITIES = _list("""
Paris London Rome Oslo Madrid Berlin Vienna Prague Lisbon Dublin Athens Cairo Tokyo Lima Delhi Boston Chicago Toronto
Sydney Nairobi Seoul Bern Warsaw Helsinki
""")

COLOURS = _list("red blue green yellow purple orange black white pink brown grey silver")
FOODS = _list("pizza pasta soup rice salad bread cheese noodles curry pancakes sushi tacos")
ANIMALS = _list("cat dog horse parrot rabbit turtle hamster goldfish pony lizard goat duck")
JOBS = _list("teacher baker doctor pilot farmer nurse painter singer lawyer plumber writer chef")

COMMON = _list("""
ability account action address advice afternoon airport album animal answer apartment apology argument arrival article
artist attempt author balance banana battery beach beauty bedroom bicycle birthday blossom boat border bottom branch
breakfast breath brother builder building business cabbage cake calendar candy captain carbon career cat ceiling
center chair chance change chapter cheese chicken child choice church cinema citizen city climate clothes coast
college color comfort common company concert contest control copper corner country courage cousin cover cricket
culture curtain customer damage dance danger daughter decade degree delivery dentist design detail diamond dinner
doctor dog dollar dolphin door double dream dress driver duck earth economy edge effect effort egg elbow elephant
energy engine evening event exam example exercise factory family farmer father favor fence festival field finger fire
fish flight floor flower folder food foot forest fortune freedom friend frog fruit future gallery game garage gate
ghost giant gift glass glove goal gold goose grape grass ground group growth guard guest guide habit hair hall hand
harvest head health heart heat height hero hill history holiday home honor hope horse hospital hotel hour house human
hunter husband idea image income insect inside island item jewel job joke journey judge juice jungle justice kangaroo
keyboard kid king kitchen kitten knee knife label lake language laptop lawyer leader leaf lemon lesson letter level
library light limit line lion list liver lobster loss love luck lunch machine magic mail manager map market master
matter meal member memory message metal middle milk mind minute mirror mistake moment money monkey month morning
mother motor mouse mouth movie muscle museum music nation nature neck needle nephew nerve network news night noise
north nose note novel number nurse object ocean office oil onion opinion option orange orbit order oven owner oxygen
packet page paint pair palace paper parent parrot partner party passage pattern peace peach pencil people perfume
person phone photo picture pigeon pilot pipe place plan plane planet plant plastic plate player poem poet point police
pool post pot potato power prayer present price pride prince prison prize problem product profit program promise
purpose quality quarter queen question rain range reason recipe record region relief rescue rest result review reward
rhythm rice river road robot rock roof room root rose route rule safety sailor salmon sample sand scale scene school
science score sea season seat second secret seed sense shadow shape sheep shelter shirt shock shoe shop shoulder signal
singer sister skill skin sky sleep smile smoke snake snow society soil soldier song soup source south space speaker
spider spirit sport spring square squirrel stage stamp star station steam step stomach stone store storm story
strategy strawberry stream street student style subject success summer sun surface surprise sweater swimmer system
target task taste teacher team theory thing thought thunder tiger time title toast tooth topic touch tourist tower town
trade traffic train travel tree trial truck trust truth tunnel uncle unit valley value van victory video village
virus vision visitor voice volcano voyage wall water wave weather wedding weight west wheel whisper wind winner winter
wisdom woman wonder wood word work worker world writer yard year youth
""")

CJK = (
    "的一是不了人我在有他这中大来上国个到说们为子和你地出道也时年得就那要下以生会自着去之过家学对可她里后小么心多天而能好都然没日于起"
    "还发成事只作当想看文无开手十用主行方又如前所本见经头面公同三已老从动两长知民样现分将外但身些与高意进把法此实回二理美点月明其种声全"
    "工己话儿者向情部正名定女问力机给等几很业最间新什打便位因重被走电四第门相次东政海口使教西再平真听世气信北少关并内加化由却代军产入先"
    "山五太水万市眼体别处总才场师书比住员九笑性通目华报立马命张活难神数件安表原车白应路期叫死常提感金何更反合放做系计或司利受光王果亲界"
    "春夏秋冬花鸟鱼虫风雨雪云星空森林桜駅猫犬茶"
)

EMOJI = (
    "😀😂😊😍😎🤔😴😭😡🥳👍👎👏🙏💪🎉🎈🎁🎂🍎🍌🍇🍉🍓🍕🍔🍟🍣🍩🍪☕🍵🐶"
    "🐱🐭🐰🦊🐻🐼🐸🐵🦁🐢🐙🐳🦋🌍🌙⭐🌈🔥💧❄🌸🌲🚀🚗🚲✈🏠📚📱💡🔑🎵⚽🏀"
)

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen", "Poland": "Warsaw",
    "Austria": "Vienna", "Hungary": "Budapest", "Greece": "Athens", "Ireland": "Dublin", "Iceland": "Reykjavik",
    "Belgium": "Brussels", "Romania": "Bucharest", "Bulgaria": "Sofia", "Croatia": "Zagreb", "Serbia": "Belgrade",
    "Ukraine": "Kyiv", "Russia": "Moscow", "Turkey": "Ankara", "Egypt": "Cairo", "Kenya": "Nairobi",
    "Ghana": "Accra", "Senegal": "Dakar", "Ethiopia": "Addis Ababa", "Japan": "Tokyo", "China": "Beijing",
    "India": "New Delhi", "Nepal": "Kathmandu", "Thailand": "Bangkok", "Vietnam": "Hanoi", "Indonesia": "Jakarta",
    "Iran": "Tehran", "Iraq": "Baghdad", "Cuba": "Havana", "Canada": "Ottawa", "Peru": "Lima", "Chile": "Santiago",
    "Argentina": "Buenos Aires", "Brazil": "Brasilia", "Colombia": "Bogota", "Ecuador": "Quito",
    "Venezuela": "Caracas", "Uruguay": "Montevideo", "Australia": "Canberra", "South Korea": "Seoul",
    "Morocco": "Rabat", "Switzerland": "Bern", "Mexico": "Mexico City",
}  # fmt: skip

ELEMENTS = {
    "hydrogen": "H", "helium": "He", "lithium": "Li", "carbon": "C", "nitrogen": "N", "oxygen": "O", "fluorine": "F",
    "neon": "Ne", "sodium": "Na", "magnesium": "Mg", "aluminium": "Al", "silicon": "Si", "phosphorus": "P",
    "sulfur": "S", "chlorine": "Cl", "argon": "Ar", "potassium": "K", "calcium": "Ca", "titanium": "Ti",
    "chromium": "Cr", "manganese": "Mn", "iron": "Fe", "cobalt": "Co", "nickel": "Ni", "copper": "Cu", "zinc": "Zn",
    "bromine": "Br", "krypton": "Kr", "silver": "Ag", "tin": "Sn", "iodine": "I", "xenon": "Xe", "tungsten": "W",
    "platinum": "Pt", "gold": "Au", "mercury": "Hg", "lead": "Pb", "radon": "Rn", "radium": "Ra", "uranium": "U",
}  # fmt: skip

OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "left": "right", "day": "night", "open": "closed", "full": "empty",
    "early": "late", "fast": "slow", "happy": "sad", "hard": "soft", "heavy": "light", "high": "low", "long": "short",
    "loud": "quiet", "new": "old", "rich": "poor", "strong": "weak", "tall": "short", "thick": "thin", "true": "false",
    "wet": "dry", "wide": "narrow", "young": "old", "black": "white", "clean": "dirty", "deep": "shallow",
    "easy": "difficult", "first": "last", "friend": "enemy", "front": "back", "good": "bad", "inside": "outside",
    "laugh": "cry", "love": "hate", "push": "pull", "question": "answer", "rise": "fall", "sharp": "blunt",
    "sink": "float", "smooth": "rough", "start": "finish", "sweet": "sour", "win": "lose", "north": "south",
    "east": "west", "buy": "sell", "give": "take", "remember": "forget", "above": "below", "before": "after",
    "always": "never", "many": "few", "near": "far", "safe": "dangerous", "brave": "cowardly", "cheap": "expensive",
    "war": "peace",
}  # fmt: skip
