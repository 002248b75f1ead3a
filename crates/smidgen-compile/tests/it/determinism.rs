//! The same request always compiles to the same plan, byte for byte.
//!
//! Every map inside the compiler has its own random seed, so two compilations in one process differ if a plan depends on
//! the order of a map.

use crate::shapes;
use smidgen_compile::adapter::{Layers, Targets};
use smidgen_compile::{AdapterForm, Request, TrainedBiases, compile};
use smidgen_ir::text::render_plan;
use smidgen_ir::{LayerSet, Policy};

#[test]
fn the_same_request_gives_the_same_plan() {
    let spec = shapes::llama(64, 96, 6, (8, 2), 300, true);
    let lora = shapes::request(spec, Targets::AllLinear, Layers::Last(4), 96, 5);
    same_plans(&Request { dropout: 0.05, ..lora.clone() });
    let fused = shapes::request(shapes::small_phi3(6), Targets::AllLinear, Layers::All, 96, 5);
    for form in [AdapterForm::Dora, AdapterForm::Fourier { reg: 0.1 }] {
        for request in [&lora, &fused] {
            let biases = TrainedBiases::All;
            same_plans(&Request { dropout: 0.05, form, biases, ..request.clone() });
        }
    }
}

fn same_plans(request: &Request) {
    for recompute in [LayerSet::none(), LayerSet::from_iter([2, 5]), LayerSet::first(6)] {
        let policy = Policy::resident(recompute, 16);
        let first = compile(request, &policy);
        for _ in 0..3 {
            let again = compile(&request.clone(), &policy);
            assert_eq!(render_plan(&first), render_plan(&again));
            // The text leaves out some of the table.
            assert!(first == again, "the plans differ and their texts do not");
        }
    }
}
