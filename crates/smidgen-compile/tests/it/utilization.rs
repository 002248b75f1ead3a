//! The transient region is packed tightly: live bytes at the peak ÷ reserved bytes.

use crate::shapes;
use smidgen_compile::adapter::{Layers, Targets};
use smidgen_compile::{Policy, Recompute, compile};

#[test]
fn transient_region_is_nearly_full_at_the_peak() {
    for (name, spec) in [("1B", shapes::llama_1b()), ("8B", shapes::llama_8b()), ("70B", shapes::llama_70b())]
    {
        let layers = spec.layers;
        let request = shapes::request(spec, Targets::AllLinear, Layers::All, 2048, 1);
        for recompute in [Recompute::none(), Recompute::first(layers)] {
            let policy = Policy { recompute, loss_chunk: 128 };
            let start = std::time::Instant::now();
            let plan = compile(&request, &policy);
            eprintln!("{name} {:.4} {:?} {}", plan.utilization(), start.elapsed(), plan.transient_bytes);
            let recomputed = policy.recompute.layers.len();
            let utilization = plan.utilization();
            assert!(utilization >= 0.98, "{name} with {recomputed} layers recomputed: {utilization:.4}");
        }
    }
}
