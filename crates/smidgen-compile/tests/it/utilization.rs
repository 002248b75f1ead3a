//! The transient region is packed tightly: the ratio of bytes in use at the peak to reserved bytes is near 1.
//!
//! Tested with real shapes. The ratio leaves out the weights, which would hide bad packing.

use crate::shapes;
use smidgen_compile::adapter::{Layers, Targets};
use smidgen_compile::compile;
use smidgen_ir::{LayerSet, Policy};

#[test]
fn transient_region_is_nearly_full_at_the_peak() {
    for (name, spec) in [("1B", shapes::llama_1b()), ("8B", shapes::llama_8b()), ("70B", shapes::llama_70b())]
    {
        let layers = spec.layers.len();
        let request = shapes::request(spec, Targets::AllLinear, Layers::All, 2048, 1);
        for recompute in [LayerSet::none(), LayerSet::every(2, layers), LayerSet::first(layers)] {
            let recomputed = recompute.len();
            let plan = compile(&request, &Policy::resident(recompute, 128));
            let utilization = plan.utilization();
            assert!(utilization >= 0.98, "{name} with {recomputed} layers recomputed: {utilization:.4}");
        }
    }
}
