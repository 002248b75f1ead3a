//! Kinds of weights: attention, experts, routers and so on, by the paths of their modules.
//!
//! A plan says of each kind what is trained and what is frozen, because a name in a list of targets may mean less than
//! its reader thinks. Left out: what is trained (`adapter.rs`).

use super::audio::AUDIO;
use super::experts::ExpertsSpec;
use super::layer::TOKEN_GATE;
use super::recurrent::{DELTA, RecurrentSpec, SHORT_CONV};
use super::spec::{
    DecoderSpec, EMBEDDING, HEAD, PER_LAYER_EMBEDDING, PER_LAYER_NORM, PER_LAYER_PROJECTION, UNTIED_HEAD,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WeightKind {
    Embeddings,
    Attention,
    Recurrent,
    FeedForward,
    SharedExperts,
    Experts,
    Routers,
    Norms,
    Head,
    Audio,
}

impl WeightKind {
    pub fn name(self) -> &'static str {
        match self {
            WeightKind::Embeddings => "embeddings",
            WeightKind::Attention => "attention",
            WeightKind::Recurrent => "recurrent layers",
            WeightKind::FeedForward => "feed-forward",
            WeightKind::SharedExperts => "shared experts",
            WeightKind::Experts => "experts",
            WeightKind::Routers => "routers",
            WeightKind::Norms => "norms",
            WeightKind::Head => "head",
            WeightKind::Audio => "audio encoder",
        }
    }
}

impl DecoderSpec {
    /// The kind of a tensor or of a linear, by its name.
    pub fn kind_of(&self, name: &str) -> WeightKind {
        if name.starts_with(AUDIO) {
            return WeightKind::Audio;
        }
        let in_layer = name.strip_prefix("model.layers.").and_then(|rest| {
            let (layer, path) = rest.split_once('.')?;
            Some((self.layers.get(layer.parse::<usize>().ok()?)?, path))
        });
        let Some((layer, path)) = in_layer else {
            return match name {
                EMBEDDING | PER_LAYER_EMBEDDING | PER_LAYER_NORM => WeightKind::Embeddings,
                HEAD | UNTIED_HEAD => WeightKind::Head,
                _ if name.starts_with(PER_LAYER_PROJECTION) => WeightKind::Embeddings,
                _ => WeightKind::Norms,
            };
        };
        let module = path.strip_suffix(".weight").unwrap_or(path);
        let of_recurrent = match layer.recurrent() {
            Some(RecurrentSpec::Delta(_)) => is_below(path, DELTA),
            Some(RecurrentSpec::ShortConv(_)) => is_below(path, SHORT_CONV),
            Some(RecurrentSpec::Mamba(mamba)) => is_below(path, mamba.module),
            None => false,
        };
        match layer.experts().and_then(|experts| kind_in_experts(experts, path)) {
            Some(kind) => kind,
            None if of_recurrent => WeightKind::Recurrent,
            None if module.ends_with("norm") || module.ends_with("layer_scalar") => WeightKind::Norms,
            None if path.starts_with("self_attn.") => WeightKind::Attention,
            None if path.starts_with(TOKEN_GATE) || path.starts_with("per_layer_") => WeightKind::Embeddings,
            None => WeightKind::FeedForward,
        }
    }
}

fn is_below(path: &str, module: &str) -> bool {
    path.strip_prefix(module).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

fn kind_in_experts(experts: &ExpertsSpec, path: &str) -> Option<WeightKind> {
    let names = &experts.names;
    let of_router = [names.router, names.correction, names.scales];
    let of_norm = experts.router_norm.is_some_and(|norm| path == norm.weight);
    let of_shared = experts.shared.as_ref().is_some_and(|shared| {
        let gate = shared.gate.is_some_and(|gate| is_below(path, gate));
        gate || is_below(path, shared.gated.module)
    });
    if is_below(path, names.experts) {
        Some(WeightKind::Experts)
    } else if of_norm || of_router.iter().any(|own| is_below(path, own)) {
        Some(WeightKind::Routers)
    } else {
        of_shared.then_some(WeightKind::SharedExperts)
    }
}
