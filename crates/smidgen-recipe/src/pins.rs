//! The keys of `[memory]` that fix a memory choice: how they are read into [`Pins`] and rendered again.
//!
//! Most keys set one pin. `memory.weights` and `memory.activations` say where something is stored and how much of it,
//! so they set several.

use crate::read::{Reader, parse_count_from_one, read_count, read_layer_list, reader};
use crate::toml_text::{RenderValue, quoted};
use crate::value::Given;
use smidgen_ir::{LayerRule, Order, Pins, Sharding, Space};

pub(crate) const TOKENS: Reader<Option<usize>> =
    reader("`auto`, or a whole number of at least 1", &["auto"], |given| match given.text() {
        Some(text) if text == "auto" => Some(None),
        _ => Some(Some(read_count::<usize, 1>(given)?)),
    });

pub(crate) const TOKENS_OR_NONE: Reader<Option<Option<usize>>> =
    reader("`auto`, `none`, or a whole number of at least 1", &["auto", "none"], |given| {
        match given.text().as_deref() {
            Some("auto") => Some(None),
            Some("none") => Some(Some(None)),
            _ => Some(Some(Some(read_count::<usize, 1>(given)?))),
        }
    });

pub(crate) const LAYERS: Reader<Option<LayerRule>> = reader(
    "`auto`, `none`, `all`, `every:2`, or a list of different layer numbers",
    &["auto", "none", "all", "every:2"],
    |given| {
        if let Some(list) = read_layer_list(given) {
            return Some(Some(LayerRule::List(list)));
        }
        let text = given.text()?;
        Some(match text.as_str() {
            "auto" => None,
            "none" => Some(LayerRule::None),
            "all" => Some(LayerRule::All),
            other => Some(LayerRule::Every(parse_count_from_one(other.strip_prefix("every:")?)?)),
        })
    },
);

pub(crate) const SPACE: Reader<Option<Space>> =
    reader("", &["auto", "device", "host", "disk"], |given| auto_or_name(given, &Space::ALL, Space::name));

pub(crate) const SHARD: Reader<Option<Sharding>> =
    reader("", &["auto", "none", "moments", "gradients", "weights"], |given| {
        auto_or_name(given, &Sharding::ALL, Sharding::name)
    });

pub(crate) const ORDER: Reader<Option<Order>> =
    reader("", &["auto", "depth", "breadth"], |given| auto_or_name(given, &Order::ALL, Order::name));

/// `auto`, or one of `all` by its name.
fn auto_or_name<T: Copy>(given: &Given<'_>, all: &[T], name: fn(T) -> &'static str) -> Option<Option<T>> {
    match given.text()?.as_str() {
        "auto" => Some(None),
        text => Some(Some(*all.iter().find(|choice| name(**choice) == text)?)),
    }
}

pub(crate) fn pin_shard(pins: &mut Pins, sharding: Option<Sharding>) {
    pins.sharding = sharding;
}

pub(crate) fn show_shard(pins: &Pins) -> String {
    render_pin(&pins.sharding)
}

/// Where weights are stored, and the share of the layers that is offloaded: above 0 and at most 1.
pub(crate) const WEIGHTS: Reader<Option<(Space, f64)>> = reader(
    "`auto`, `device`, `host`, `host:0.5` (a fraction above 0, at most 1) or `disk`",
    &["auto", "device", "host", "disk"],
    |given| {
        let text = given.text()?;
        Some(match text.as_str() {
            "auto" => None,
            "device" => Some((Space::Device, 0.0)),
            "host" => Some((Space::Host, 1.0)),
            "disk" => Some((Space::Disk, 1.0)),
            other => {
                let share: f64 = other.strip_prefix("host:")?.parse().ok()?;
                (share > 0.0 && share <= 1.0).then_some(Some((Space::Host, share)))?
            }
        })
    },
);

pub(crate) fn pin_weights(pins: &mut Pins, weights: Option<(Space, f64)>) {
    pins.weights = weights.map(|(space, _)| space);
    (pins.offloaded_weights, pins.tables_offloaded) = match weights {
        None | Some((Space::Device, _)) => (None, None),
        Some((_, 1.0)) => (Some(LayerRule::All), Some(true)),
        // Embedding and LM head belong to no layer, so the solver decides about them.
        Some((_, share)) => (Some(LayerRule::Share(share)), None),
    };
}

pub(crate) fn show_weights(pins: &Pins) -> String {
    match (pins.weights, &pins.offloaded_weights) {
        (Some(space), Some(LayerRule::Share(share))) => quoted(&format!("{}:{share}", space.name())),
        (weights, _) => render_pin(&weights),
    }
}

pub(crate) fn pin_activations(pins: &mut Pins, space: Option<Space>) {
    pins.activations = space;
    pins.offloaded_activations = space.filter(|space| *space != Space::Device).map(|_| LayerRule::All);
}

pub(crate) fn show_activations(pins: &Pins) -> String {
    render_pin(&pins.activations)
}

/// A pin as TOML.
pub(crate) fn render_pin<T: RenderValue>(pin: &Option<T>) -> String {
    pin.as_ref().map_or_else(|| quoted("auto"), T::render)
}

impl RenderValue for Option<usize> {
    fn render(&self) -> String {
        self.as_ref().map_or_else(|| quoted("none"), usize::render)
    }
}

macro_rules! render_names {
    ($($choice:ty),+) => {$(
        impl RenderValue for $choice {
            fn render(&self) -> String {
                quoted(self.name())
            }
        }
    )+};
}

render_names!(Space, Sharding, Order);

impl RenderValue for LayerRule {
    fn render(&self) -> String {
        match self {
            LayerRule::None => quoted("none"),
            LayerRule::All => quoted("all"),
            LayerRule::Every(n) => quoted(&format!("every:{n}")),
            LayerRule::Share(share) => share.render(),
            LayerRule::List(layers) => layers.render(),
        }
    }
}
