"""Words of the tasks. Names (keys) are an adjective and a noun."""

ADJECTIVES = tuple(
    """amber ancient bitter black blue bold brave brief bright broad broken bronze brown busy calm
    careful cheap clean clear clever cold common cool copper cosy crimson crisp crooked curious
    curly damp dark deep distant double dry dull dusty eager early easy elder empty even faint fair
    faithful famous fancy fast fierce fine firm flat fond formal free fresh frozen gentle giant
    glad golden grand grave great green grey handy happy hard heavy hidden high hollow honest huge
    humble icy idle inner iron ivory jolly keen kind large late lazy light little lively lone long
    loose loud lucky marble mellow merry mild misty modest narrow neat noble northern odd old olive
    open orange pale patient plain polite proud purple quick quiet rapid rare red rich ripe rough
    round royal rusty scarlet secret shallow sharp shiny short shy silent silver simple slim slow
    small smooth soft solid sour southern square steady steep still strange strong sunny sweet swift
    tall tame thick thin tidy tiny tough true upper vast velvet violet warm weary white wide wild
    wise wooden yellow young""".split()
)

NOUNS = tuple(
    """acorn actor album anchor anvil apple apron arch arrow artist badge badger baker ballad bank
    banner barrel basin basket beacon beaver bell bench berry bishop blanket boat book boot bottle
    branch bread bridge broom brush bucket butter button cabin cable camel camera candle canoe
    canvas captain carpet carrot castle cat cedar cellar chain chair chapel cherry chess child
    chimney circle city clerk cliff clock cloud clover coach coast cobra coin comet compass cook
    coral cottage cotton crab crane crown cup curtain daisy dancer deer desk diamond doctor dog
    dolphin donkey door dragon drawer drum duck eagle elbow elm engine falcon farmer feather fence
    ferry fiddle field finger fire fish flag flame flower flute forest fork fountain fox frog
    garden garlic gate ginger glacier glove goat goose grape guitar hammer harbor harp hat hawk
    hazel helmet heron hill hinge honey horn horse hotel house island jacket jar jewel judge juice
    jungle kettle key king kite kitten knight ladder lake lamp lantern leaf lemon letter lily lion
    lizard lobster lock magnet maple market mask meadow melon mill mirror monkey moon mountain
    mouse museum needle nest nurse oak oar ocean onion orchard otter oven owl oyster paddle painter
    palace panda paper parrot peach pearl pebble pencil pepper piano pigeon pillow pilot pine
    planet plum pocket poet pond poppy prince pump puppet rabbit radio raven ribbon river road
    robin rocket roof rope rose saddle sailor salmon sandal saw school scissors shed sheep shell
    ship shovel singer snail sparrow spider spoon spring squirrel stable stamp star statue stone
    storm street summit swan table tailor temple thistle tiger toad tower train trumpet tulip
    tunnel turtle umbrella valley violin wagon walnut whale wheel willow window wolf wren""".split()
)

VERBS = tuple(
    """admires answers avoids bothers calls carries catches chases cleans covers crosses draws
    dreams expects feeds finds follows greets guards guides hears helps hides holds ignores joins
    keeps knows leads leaves likes lifts loves meets misses moves needs notices paints passes
    praises protects pulls pushes reaches remembers saves sees sells serves shakes shows studies
    teaches thanks touches trusts visits wants warns washes watches""".split()
)
