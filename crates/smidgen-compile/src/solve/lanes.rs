//! A simulation of one micro-step, layer by layer: computation, and one transfer at a time in each direction, in seconds.
//!
//! A transfer to the device starts as early as the window allows, and the computation that needs it waits for it. A layer's
//! activations must have left the device two layers later. `Profile::entry_seconds` does the same step by step.

/// What one layer computes and transfers.
#[derive(Clone, Copy, Debug, Default)]
pub struct Visit {
    pub forward_s: f64,
    pub backward_s: f64,
    /// Fetching its offloaded weights.
    pub weights_s: f64,
    /// Offloading its activations, and fetching them back.
    pub stow_s: f64,
    pub back_s: f64,
    /// Fetching and offloading its gradients.
    pub gradient_s: [f64; 2],
}

#[derive(Clone, Debug, Default)]
pub struct Lanes {
    /// When the computation so far ends.
    now: f64,
    /// When the transfers to the device so far end.
    inward: f64,
    /// When the transfers from the device so far end.
    outward: f64,
    /// Layers of weights that may be on the device at the same time.
    window: usize,
    /// Start and end of each computation with fetched weights.
    visits: Vec<(f64, f64)>,
    /// When the last layer's forward pass ended.
    turned: f64,
}

/// Share of a layer's activations that its backward pass needs first: there are about eight of them.
const FIRST_SHARE: f64 = 1.0 / 8.0;

impl Lanes {
    pub fn with_window(window: usize) -> Lanes {
        Lanes { window, ..Lanes::default() }
    }

    pub fn forward(&mut self, layers: &[Visit]) {
        let mut stowed = vec![0.0f64; layers.len()];
        for (index, layer) in layers.iter().enumerate() {
            self.fetch_weights(layer.weights_s);
            if index >= 2 {
                self.now = self.now.max(stowed[index - 2]);
            }
            let began = self.now;
            self.compute(layer.forward_s, layer.weights_s > 0.0);
            if layer.stow_s > 0.0 {
                // Its values leave one after the other, the first ones soon after the layer began.
                self.outward = self.outward.max(began.midpoint(self.now)) + layer.stow_s;
                stowed[index] = self.outward;
            }
        }
        self.turned = self.now;
        self.now = stowed.iter().copied().fold(self.now, f64::max);
    }

    /// Computes what is outside the layers; `is_prefetched` says whether its weights may be fetched before.
    pub fn head(&mut self, seconds: f64, weights_s: f64, is_prefetched: bool) {
        if weights_s > 0.0 {
            if !is_prefetched {
                self.inward = self.inward.max(self.now);
            }
            self.fetch_weights(weights_s);
        }
        self.compute(seconds, weights_s > 0.0);
    }

    pub fn backward(&mut self, layers: &[Visit]) {
        let mut middles = vec![self.turned; layers.len() + 2];
        for (index, layer) in layers.iter().enumerate().rev() {
            if layer.back_s > 0.0 {
                // Two layers have room: the values of this one arrive while those of the layer after next are freed.
                self.inward = self.inward.max(middles[index + 2]) + layer.back_s;
                self.now = self.now.max(self.inward - (1.0 - FIRST_SHARE) * layer.back_s);
            }
            let arrived = self.inward;
            self.fetch_weights(layer.weights_s);
            let [fetch_s, stow_s] = layer.gradient_s;
            if stow_s > 0.0 {
                self.inward += fetch_s;
                self.now = self.now.max(self.inward);
            }
            let began = self.now;
            self.compute(layer.backward_s, layer.weights_s > 0.0);
            if layer.back_s > 0.0 {
                self.now = self.now.max(arrived + FIRST_SHARE * layer.backward_s);
            }
            if stow_s > 0.0 {
                self.outward = self.outward.max(began.midpoint(self.now)) + stow_s;
            }
            middles[index] = began.midpoint(self.now);
        }
    }

    pub fn end(&self) -> f64 {
        self.now.max(self.inward).max(self.outward)
    }

    /// Fetches weights as soon as the window has room for them. The computation waits for them.
    fn fetch_weights(&mut self, seconds: f64) {
        if seconds == 0.0 {
            return;
        }
        let before = |count: usize| self.visits.len().checked_sub(count).map(|visit| self.visits[visit]);
        let room_at = match self.window {
            0 => self.now,
            // The layer before frees its matrices one after the other, on average halfway through.
            1 => before(1).map_or(0.0, |(began, ended)| began.midpoint(ended)),
            window => before(window).map_or(0.0, |(_, ended)| ended),
        };
        self.inward = self.inward.max(room_at) + seconds;
        self.now = self.now.max(self.inward);
    }

    fn compute(&mut self, seconds: f64, is_visit: bool) {
        let began = self.now;
        self.now += seconds;
        if is_visit {
            self.visits.push((began, self.now));
        }
    }
}
