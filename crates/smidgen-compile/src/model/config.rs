//! Typed reading of a `config.json`: each key is checked when it is read, and errors name the key.
//!
//! An absent key means the default of the config's class in transformers. Both spellings are understood: `rope_theta` +
//! `rope_scaling` + `torch_dtype`, and the newer `rope_parameters` + `dtype`. `null` means none.

use crate::error::ModelError;
use serde_json::{Map, Value};
use smidgen_ir::{DType, RopeScaling, RopeSpec, ScanShape};

#[derive(Clone, Copy, Debug)]
pub struct Config<'a> {
    map: &'a Map<String, Value>,
    /// What absent keys mean.
    defaults: Option<&'a Map<String, Value>>,
    /// Whether the config is a part of another one. Such a part may leave out sizes.
    is_part: bool,
    /// The prefix of keys in messages: empty, or the name of the table with a dot.
    prefix: &'static str,
}

impl<'a> Config<'a> {
    pub fn new(value: &'a Value) -> Result<Config<'a>, ModelError> {
        match value {
            Value::Object(map) => Ok(Config { map, defaults: None, is_part: false, prefix: "" }),
            other => Err(wrong("config.json", "an object", other)),
        }
    }

    fn key(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    /// The same config, whose absent keys have these values.
    pub fn with_defaults(self, defaults: &'a Map<String, Value>) -> Config<'a> {
        Config { defaults: Some(defaults), ..self }
    }

    pub fn get(&self, key: &str) -> Option<&'a Value> {
        let default = || self.defaults.and_then(|defaults| defaults.get(key));
        self.map.get(key).or_else(default).filter(|value| !value.is_null())
    }

    /// Whether the config itself says that there is none.
    pub fn is_null(&self, key: &str) -> bool {
        self.map.get(key).is_some_and(Value::is_null)
    }

    /// Whether the config itself has the key with a value.
    pub fn has_own(&self, key: &str) -> bool {
        self.map.get(key).is_some_and(|value| !value.is_null())
    }

    pub fn text(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        self.typed(key, "a string", Value::as_str)
    }

    pub fn flag(&self, key: &str, default: bool) -> Result<bool, ModelError> {
        Ok(self.typed(key, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    /// Whether the config is a part of another one.
    pub fn is_part(&self) -> bool {
        self.is_part
    }

    /// A number that is above 0 and finite in f32, because devices compute in f32.
    pub fn number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        self.typed(key, "a number above 0 that f32 can hold", positive)
    }

    /// A number that no published config leaves out or sets to null.
    pub fn required_float(&self, key: &'static str) -> Result<f32, ModelError> {
        self.float(key)?.ok_or(ModelError::Missing { key })
    }

    /// A number as devices use it.
    pub fn float(&self, key: &str) -> Result<Option<f32>, ModelError> {
        Ok(self.number(key)?.map(|number| number as f32))
    }

    /// A size: a whole number from 1 to 2^31.
    pub fn size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        self.typed(key, "a whole number above 0", |value| {
            value.as_u64().filter(|n| (1..=1 << 31).contains(n)).and_then(|n| usize::try_from(n).ok())
        })
    }

    /// A whole number from 0 to 2^31.
    pub fn count(&self, key: &str) -> Result<Option<usize>, ModelError> {
        self.typed(key, "a whole number, 0 or above", |value| {
            value.as_u64().filter(|n| *n <= 1 << 31).and_then(|n| usize::try_from(n).ok())
        })
    }

    /// A whole number of either sign.
    pub fn whole(&self, key: &str) -> Result<Option<i64>, ModelError> {
        self.typed(key, "a whole number", Value::as_i64)
    }

    pub fn required_size(&self, key: &'static str) -> Result<usize, ModelError> {
        self.size(key)?.ok_or(ModelError::Missing { key })
    }

    /// Refuses a config without a size that every published config has: the default fits few models. A part of another
    /// config may leave it out.
    fn require_own(&self, key: &'static str) -> Result<(), ModelError> {
        if self.is_part || self.has_own(key) { Ok(()) } else { Err(ModelError::Missing { key }) }
    }

    /// A dimension of the model. The limit keeps byte counts of tensors from overflowing.
    pub fn dimension(&self, key: &str) -> Result<Option<usize>, ModelError> {
        self.at_most(key, MOST_CHANNELS, "sizes up to 4194304")
    }

    pub fn required_dimension(&self, key: &'static str) -> Result<usize, ModelError> {
        self.require_own(key)?;
        self.dimension(key)?.ok_or(ModelError::Missing { key })
    }

    pub fn required_layers(&self, key: &'static str) -> Result<usize, ModelError> {
        self.require_own(key)?;
        self.at_most(key, MOST_LAYERS, "up to 4096 layers")?.ok_or(ModelError::Missing { key })
    }

    fn at_most(&self, key: &str, most: usize, supported: &'static str) -> Result<Option<usize>, ModelError> {
        match self.size(key)? {
            Some(size) if size > most => {
                Err(ModelError::unsupported(self.key(key), size.to_string(), supported))
            }
            size => Ok(size),
        }
    }

    pub fn table(&self, key: &'static str, prefix: &'static str) -> Result<Option<Config<'a>>, ModelError> {
        let map = self.typed(key, "an object", Value::as_object)?;
        Ok(map.map(|map| Config { map, defaults: None, is_part: true, prefix }))
    }

    /// The tables of a table, by their keys.
    pub fn tables(&self, prefix: &'static str) -> Result<Vec<(&'a str, Config<'a>)>, ModelError> {
        let table = |(key, value): (&'a String, &'a Value)| match value {
            Value::Object(map) => Ok((key.as_str(), Config { map, defaults: None, is_part: true, prefix })),
            other => Err(wrong(&self.key(key), "an object", other)),
        };
        self.map.iter().map(table).collect()
    }

    /// Refuses every key but these.
    pub fn refuse_others(&self, known: &[&str]) -> Result<(), ModelError> {
        let others = self.map.keys().filter(|key| !known.contains(&key.as_str()));
        others.into_iter().try_for_each(|key| self.refuse(key, &[], "no such key"))
    }

    fn typed<T>(
        &self,
        key: &str,
        expected: &'static str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| wrong(&self.key(key), expected, value))
    }

    /// Refuses a key that has any value but those that change nothing.
    pub fn refuse(&self, key: &str, harmless: &[Value], supported: &'static str) -> Result<(), ModelError> {
        match self.get(key) {
            Some(value) if !harmless.contains(value) => {
                Err(ModelError::unsupported(self.key(key), shortened(value), supported))
            }
            _ => Ok(()),
        }
    }

    /// The element type of the stored weights; `f32` if the config has none.
    pub fn stored_dtype(&self) -> Result<DType, ModelError> {
        let key = if self.get("dtype").is_some() { "dtype" } else { "torch_dtype" };
        match self.text(key)? {
            None | Some("float32") => Ok(DType::F32),
            Some("bfloat16") => Ok(DType::Bf16),
            Some("float16") => Ok(DType::F16),
            Some(other) => Err(ModelError::unsupported(key, other, "float32, bfloat16, float16")),
        }
    }

    /// The rotary embedding for heads of `head_dim` channels, in either spelling; `is_partial` if the share of rotated
    /// channels counts.
    pub fn rope(&self, is_partial: bool, head_dim: usize) -> Result<RopeSpec, ModelError> {
        let newer = self.table("rope_parameters", "rope_parameters.")?;
        let older = self.table("rope_scaling", "rope_scaling.")?;
        let theta = self.number("rope_theta")?.unwrap_or(10_000.0);
        self.rope_of_table(is_partial, newer.or(older), theta, head_dim)
    }

    /// The rotary embeddings of layers without a window and of those with one. Older configs scale only the first.
    pub fn ropes_of_kinds(
        &self,
        [full_theta, sliding_theta]: [f64; 2],
        [full_dim, sliding_dim]: [usize; 2],
    ) -> Result<[RopeSpec; 2], ModelError> {
        let newer = self.table("rope_parameters", "rope_parameters.")?;
        let of_kind = |key, prefix| newer.map_or(Ok(None), |table| table.table(key, prefix));
        let sliding = of_kind("sliding_attention", "rope_parameters.sliding_attention.")?;
        let full = match of_kind("full_attention", "rope_parameters.full_attention.")? {
            Some(table) => Some(table),
            None => self.table("rope_scaling", "rope_scaling.")?,
        };
        if let Some(flat) = newer.filter(|table| table.has_own("rope_type") || table.has_own("type")) {
            let key = if flat.has_own("rope_type") { "rope_type" } else { "type" };
            flat.refuse(key, &[], "a table for each kind of layer: full_attention, sliding_attention")?;
        }
        let rope = |table, theta, head_dim| self.rope_of_table(false, table, theta, head_dim);
        Ok([rope(full, full_theta, full_dim)?, rope(sliding, sliding_theta, sliding_dim)?])
    }

    /// A list of whole numbers, 0 or above.
    pub fn counts(&self, key: &str) -> Result<Option<Vec<usize>>, ModelError> {
        let number = |value: &Value| value.as_u64().and_then(|number| usize::try_from(number).ok());
        self.typed(key, "a list of whole numbers", |value| value.as_array()?.iter().map(number).collect())
    }

    /// A list of flags: false and 0 are off.
    pub fn flags(&self, key: &str) -> Result<Option<Vec<bool>>, ModelError> {
        let is_on = |flag: &Value| flag.as_bool().or_else(|| flag.as_f64().map(|flag| flag != 0.0));
        self.typed(key, "a list of numbers", |value| value.as_array()?.iter().map(is_on).collect())
    }

    /// A list of a flag for each layer.
    pub fn layer_flags(&self, key: &str, layers: usize) -> Result<Option<Vec<bool>>, ModelError> {
        self.flags(key)?.map(|flags| self.check_layers(key, flags, layers)).transpose()
    }

    /// A list of words for each layer, by their place in `supported`, where commas separate them.
    pub fn layer_words(
        &self,
        key: &str,
        layers: usize,
        supported: &'static str,
    ) -> Result<Option<Vec<usize>>, ModelError> {
        let Some(list) = self.typed(key, "a list with a word for each layer", Value::as_array)? else {
            return Ok(None);
        };
        let list = self.check_layers(key, list.iter().collect(), layers)?;
        let place = |word: &Value| {
            let found = supported.split(", ").position(|own| word.as_str() == Some(own));
            found.ok_or_else(|| ModelError::unsupported(key, shortened(word), supported))
        };
        Ok(Some(list.into_iter().map(place).collect::<Result<_, _>>()?))
    }

    /// Refuses a list that has not one entry for each layer.
    pub fn check_layers<T>(&self, key: &str, list: Vec<T>, layers: usize) -> Result<Vec<T>, ModelError> {
        if list.len() == layers {
            return Ok(list);
        }
        let what = format!("`{}` has {} entries for {layers} layers", self.key(key), list.len());
        Err(ModelError::Contradiction { what })
    }

    /// Every `partial_rotary_factor` of the config, in the tables of rotary embeddings too.
    pub fn rotary_shares(&self) -> Result<Vec<f64>, ModelError> {
        let newer = self.table("rope_parameters", "rope_parameters.")?;
        let older = self.table("rope_scaling", "rope_scaling.")?;
        let of_kind = |kind: &'static str| newer.map_or(Ok(None), |table| table.table(kind, kind));
        let tables = [Some(*self), newer, older, of_kind("full_attention")?, of_kind("sliding_attention")?];
        // Of a proportional embedding the share is obeyed.
        let tables = tables.map(|table| table.filter(|table| !table.is_rope("proportional")));
        let shares = tables.into_iter().flatten().map(|table| table.number("partial_rotary_factor"));
        Ok(shares.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect())
    }

    /// The rotary embedding of a table; `theta` and the share of rotated channels may also be outside the table.
    pub fn rope_of_table(
        &self,
        is_partial: bool,
        table: Option<Config<'a>>,
        theta: f64,
        head_dim: usize,
    ) -> Result<RopeSpec, ModelError> {
        let own = |key: &str| table.map_or(Ok(None), |table| table.number(key));
        let theta = own("rope_theta")?.unwrap_or(theta);
        let share = match own("partial_rotary_factor")? {
            Some(share) => share,
            None => self.number("partial_rotary_factor")?.unwrap_or(1.0),
        };
        let rotated = (head_dim as f64 * share) as usize;
        let is_proportional = table.is_some_and(|table| table.is_rope("proportional"));
        let dim = if is_partial && !is_proportional { rotated } else { head_dim };
        if is_partial && (share > 1.0 || !dim.is_multiple_of(2) || dim == 0) {
            let supported = "a share of the head that is an even number of channels";
            return Err(ModelError::unsupported("partial_rotary_factor", share.to_string(), supported));
        }
        let plain = RopeSpec::plain(theta as f32, dim);
        if let Some(table) = table.filter(|_| is_proportional) {
            let factor = table.float("factor")?.unwrap_or(1.0);
            let scaling = RopeScaling::Proportional { rotated_pairs: rotated / 2, factor };
            return Ok(RopeSpec { scaling, ..plain });
        }
        let rope = table.map_or(Ok(plain.clone()), |table| table.scaled_rope(plain, self))?;
        // In transformers the formulas of scaled embeddings read the key, and such a model then fails.
        if !is_partial && !is_proportional && share != 1.0 && rope.scaling != RopeScaling::Default {
            let supported = "1 for this model type with a scaled rotary embedding";
            return Err(ModelError::unsupported("partial_rotary_factor", share.to_string(), supported));
        }
        Ok(rope)
    }

    fn is_rope(&self, kind: &str) -> bool {
        let own = self.get("rope_type").or_else(|| self.get("type"));
        own.and_then(Value::as_str) == Some(kind)
    }

    fn scaled_rope(&self, plain: RopeSpec, config: &Config<'_>) -> Result<RopeSpec, ModelError> {
        let key = if self.get("rope_type").is_some() { "rope_type" } else { "type" };
        let factor = || -> Result<f32, ModelError> {
            Ok(self.number("factor")?.ok_or(ModelError::Missing { key: "rope_scaling.factor" })? as f32)
        };
        // Early releases of Phi 3 called it `su` or `yarn`.
        let is_phi = config.text("model_type")? == Some("phi3");
        let kind = match self.text(key)?.unwrap_or("default") {
            "su" | "yarn" if is_phi => "longrope",
            kind => kind,
        };
        let scaling = match kind {
            "default" => return Ok(plain),
            "linear" => RopeScaling::Linear { factor: factor()? },
            "llama3" => RopeScaling::Llama3 {
                factor: factor()?,
                low_freq_factor: self.number("low_freq_factor")?.unwrap_or(1.0) as f32,
                high_freq_factor: self.number("high_freq_factor")?.unwrap_or(4.0) as f32,
                original_max_positions: self.original_positions(config)?,
            },
            "longrope" => return self.longrope(plain, config, is_phi),
            "yarn" => return self.yarn(plain, config),
            "dynamic" => RopeScaling::Dynamic {
                factor: factor()?,
                max_positions: config.required_size("max_position_embeddings")?,
            },
            other => {
                let supported = "default, linear, llama3, longrope, yarn, dynamic, proportional";
                return Err(ModelError::unsupported(self.key(key), other, supported));
            }
        };
        Ok(RopeSpec { scaling, ..plain })
    }

    /// The context before it was extended. The key at the top of the config wins over that of the table, unless kinds of
    /// layers have tables of their own.
    fn original_positions(&self, config: &Config<'_>) -> Result<usize, ModelError> {
        let key = "original_max_position_embeddings";
        let is_of_kind = self.prefix.ends_with("_attention.");
        let top = if is_of_kind { None } else { config.size(key)? };
        match top.map_or_else(|| self.size(key), |positions| Ok(Some(positions)))? {
            Some(positions) => Ok(positions),
            None => config.required_size("max_position_embeddings"),
        }
    }

    /// Cosines and sines are scaled by 1 + 0.1·ln(factor), or by a ratio of two such numbers.
    fn yarn(&self, plain: RopeSpec, config: &Config<'_>) -> Result<RopeSpec, ModelError> {
        let original_max_positions = self.original_positions(config)?;
        // Null means the ratio of the two lengths.
        let factor = match self.number("factor")? {
            Some(factor) => factor,
            None if self.map.contains_key("factor") => {
                config.required_size("max_position_embeddings")? as f64 / original_max_positions as f64
            }
            None => return Err(ModelError::Missing { key: "rope_scaling.factor" }),
        };
        let scale_of = |scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 };
        let attention_scale =
            match (self.number("attention_factor")?, self.scale("mscale")?, self.scale("mscale_all_dim")?) {
                (Some(scale), _, _) => scale,
                (None, Some(scale), Some(all)) => scale_of(scale) / scale_of(all),
                (None, _, _) => scale_of(1.0),
            };
        let scaling = RopeScaling::Yarn {
            factor: factor as f32,
            beta_fast: self.float("beta_fast")?.unwrap_or(32.0),
            beta_slow: self.float("beta_slow")?.unwrap_or(1.0),
            original_max_positions,
            truncate: self.flag("truncate", true)?,
        };
        Ok(RopeSpec { scaling, attention_scale: attention_scale as f32, ..plain })
    }

    /// A number that may be 0, which means none.
    pub fn scale(&self, key: &str) -> Result<Option<f64>, ModelError> {
        let number =
            self.typed(key, "a number, 0 or above", |value| value.as_f64().filter(|number| *number >= 0.0))?;
        Ok(number.filter(|number| *number > 0.0))
    }

    /// Cosines and sines are scaled by √(1 + ln(factor) / ln(original)), for short samples too.
    fn longrope(&self, plain: RopeSpec, config: &Config<'_>, is_phi: bool) -> Result<RopeSpec, ModelError> {
        let is_silent = is_phi && config.get("original_max_position_embeddings").is_none();
        let original_max_positions = if is_silent { 4096 } else { self.original_positions(config)? };
        let factor = match self.number("factor")? {
            Some(factor) => factor,
            None => config.required_size("max_position_embeddings")? as f64 / original_max_positions as f64,
        };
        let attention_scale = match self.number("attention_factor")? {
            Some(scale) => scale,
            None if factor <= 1.0 => 1.0,
            None => (1.0 + factor.ln() / (original_max_positions as f64).ln()).sqrt(),
        };
        let factors = |key: &'static str| {
            let list = self.numbers(key)?.ok_or(ModelError::Missing { key })?;
            if list.len() != plain.dim / 2 {
                let what = format!("`{key}` has {} numbers for {} frequencies", list.len(), plain.dim / 2);
                return Err(ModelError::Contradiction { what });
            }
            Ok(list)
        };
        let scaling = RopeScaling::LongRope {
            short: factors("short_factor")?,
            long: factors("long_factor")?,
            original_max_positions,
        };
        Ok(RopeSpec { scaling, attention_scale: attention_scale as f32, ..plain })
    }

    /// A list of `N` factors, all of them 1 if the config has none.
    pub fn factors<const N: usize>(&self, key: &str) -> Result<[f32; N], ModelError> {
        let Some(list) = self.numbers(key)? else { return Ok([1.0; N]) };
        let count = list.len();
        list.try_into().map_err(|_| ModelError::Contradiction {
            what: format!("`{}` has {count} numbers instead of {N}", self.key(key)),
        })
    }

    fn numbers(&self, key: &str) -> Result<Option<Vec<f32>>, ModelError> {
        self.typed(key, "a list of numbers above 0", |value| {
            value.as_array()?.iter().map(|number| positive(number).map(|n| n as f32)).collect()
        })
    }

    /// The windows of layers whose class in transformers has one window for all of them. A list that says otherwise is
    /// refused.
    pub fn common_window(&self, layers: usize) -> Result<Vec<Option<usize>>, ModelError> {
        let window = self.size("sliding_window")?;
        let listed = self.sliding_layers(layers)?.unwrap_or_default();
        if listed.iter().any(|slides| *slides != window.is_some()) {
            let what =
                "`layer_types` differs from `sliding_window`, which is for all layers of this model type";
            return Err(ModelError::Contradiction { what: what.into() });
        }
        Ok(vec![window; layers])
    }

    /// The windows of layers: `slides` says which layers have one if `layer_types` does not.
    pub fn windows(
        &self,
        layers: usize,
        window: Option<usize>,
        slides: impl Fn(usize) -> bool,
    ) -> Result<Vec<Option<usize>>, ModelError> {
        let listed = self.sliding_layers(layers)?;
        let slides = listed.unwrap_or_else(|| (0..layers).map(slides).collect());
        match window {
            None if slides.contains(&true) => Err(ModelError::Contradiction {
                what: "layers have sliding attention, and there is no window (`sliding_window`)".into(),
            }),
            window => Ok(slides.into_iter().map(|slides| window.filter(|_| slides)).collect()),
        }
    }

    /// The kind of each layer by its place among the `supported` ones, if `layer_types` says so. Names of older releases are those of
    /// transformers today.
    pub fn kinds_of_layers(
        &self,
        layers: usize,
        supported: &'static str,
    ) -> Result<Option<Vec<usize>>, ModelError> {
        let Some(list) = self.typed("layer_types", "a list of kinds of layers", Value::as_array)? else {
            return Ok(None);
        };
        let list = self.check_layers("layer_types", list.iter().collect(), layers)?;
        let found = list.into_iter().map(|word| {
            let name = match word.as_str() {
                Some("mamba") => "linear_attention",
                Some("attention") => "full_attention",
                other => other.unwrap_or(""),
            };
            let kind = supported.split(", ").position(|kind| kind == name);
            kind.ok_or_else(|| ModelError::unsupported(self.key("layer_types"), shortened(word), supported))
        });
        Ok(Some(found.collect::<Result<_, _>>()?))
    }

    /// The two ends of a range of numbers, of which the second may be infinite.
    pub fn range(&self, key: &str) -> Result<Option<[f32; 2]>, ModelError> {
        let number = |value: &Value| match value {
            Value::Object(map) => (map.get("__float__")? == "Infinity").then_some(f32::INFINITY),
            Value::String(text) => (text == "Infinity" || text == "inf").then_some(f32::INFINITY),
            other => other.as_f64().map(|number| number as f32),
        };
        self.typed(key, "a list of two numbers, 0 or above", |value| match value.as_array()?.as_slice() {
            [least, most] => {
                let range = [number(least)?, number(most)?];
                (range[0] >= 0.0 && range[0] <= range[1]).then_some(range)
            }
            _ => None,
        })
    }

    /// The rows that a causal convolution sees.
    pub fn taps(&self, key: &'static str) -> Result<usize, ModelError> {
        let taps = self.size(key)?.ok_or(ModelError::Missing { key })?;
        if !(2..=MOST_TAPS).contains(&taps) {
            return Err(ModelError::unsupported(self.key(key), taps.to_string(), "2 to 32 rows"));
        }
        Ok(taps)
    }

    /// Refuses heads that cannot share keys, and states that no kernel takes. The keys are those of the number of heads of
    /// keys, and of the channels of keys and of values.
    pub fn check_states(&self, keys: [&'static str; 3], scan: ScanShape) -> Result<(), ModelError> {
        let ScanShape { heads, key_heads, key_dim, value_dim, .. } = scan;
        if !heads.is_multiple_of(key_heads) {
            let what =
                format!("{heads} recurrent heads cannot share {key_heads} heads of keys (`{}`)", keys[0]);
            return Err(ModelError::Contradiction { what });
        }
        for (key, channels, heads) in [(keys[1], key_dim, key_heads), (keys[2], value_dim, heads)] {
            if channels == 0 || channels > MOST_OF_STATE {
                let supported = "recurrent heads of 1 to 256 channels";
                return Err(ModelError::unsupported(self.key(key), channels.to_string(), supported));
            }
            if heads * channels > MOST_CHANNELS {
                let supported = "recurrent heads with up to 4194304 channels in all";
                return Err(ModelError::unsupported(self.key(key), channels.to_string(), supported));
            }
        }
        Ok(())
    }

    /// Which layers have a sliding window, if `layer_types` says so.
    pub fn sliding_layers(&self, layers: usize) -> Result<Option<Vec<bool>>, ModelError> {
        let key = "layer_types";
        let expected = "a list of sliding_attention and full_attention";
        let Some(list) = self.typed(key, expected, Value::as_array)? else { return Ok(None) };
        let list = self.check_layers(key, list.iter().collect(), layers)?;
        let slides = list.into_iter().map(|word| match word.as_str() {
            Some("sliding_attention") => Ok(true),
            Some("full_attention") => Ok(false),
            _ => Err(ModelError::unsupported(key, shortened(word), "sliding_attention, full_attention")),
        });
        Ok(Some(slides.collect::<Result<_, _>>()?))
    }
}

/// Most channels of a layer and most entries of a vocabulary.
pub(super) const MOST_CHANNELS: usize = 1 << 22;
const MOST_LAYERS: usize = 4096;
const MOST_TAPS: usize = 32;
/// Most channels of a recurrent head's keys and of its values.
const MOST_OF_STATE: usize = 256;

fn positive(value: &Value) -> Option<f64> {
    value.as_f64().filter(|number| (*number as f32) > 0.0 && (*number as f32).is_finite())
}

fn wrong(key: &str, expected: &'static str, value: &Value) -> ModelError {
    ModelError::WrongType { key: key.into(), expected, got: shortened(value) }
}

/// The beginning of a value, for a message.
fn shortened(value: &Value) -> String {
    let text = value.to_string();
    if text.len() > 60 { format!("{}…", text.chars().take(60).collect::<String>()) } else { text }
}
