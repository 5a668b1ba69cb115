//! Owns the budget of one scrape: 200 tenants on 8 GPUs in less than 50 ms.
//! Refuses to judge a debug build; there it only prints.

use std::time::{Duration, Instant};

use cotenant_export::{Format, encode, otlp::Exemplars, rows};

use crate::fixture::{gpu, node, pod, tenant};

#[test]
fn a_scrape_of_200_tenants_on_8_gpus_is_within_50_ms() {
    let gpus: Vec<u32> = (0..8).collect();
    let tenants = (1..=200).map(|seed| tenant(pod(&format!("train-{seed}")), &gpus, seed)).collect();
    let view = node(gpus.iter().map(|index| gpu(*index)).collect(), tenants);
    let mut made = Vec::new();
    for _ in 0..5 {
        let begun = Instant::now();
        made = rows(&view);
        println!("rows: {} in {:?}", made.len(), begun.elapsed());
    }
    let made: std::sync::Arc<[_]> = made.into();
    for format in [Format::Text, Format::OpenMetrics, Format::Protobuf] {
        let mut best = Duration::MAX;
        let mut bytes = 0;
        // The best of several: the budget is for the code, not for the neighbours on this machine.
        for _ in 0..7 {
            let begun = Instant::now();
            bytes = encode(made.clone(), format, &Exemplars::default()).unwrap().len();
            best = best.min(begun.elapsed());
        }
        println!("{format:?}: {bytes} bytes in {best:?}");
        assert!(cfg!(debug_assertions) || best < Duration::from_millis(50), "{format:?} took {best:?}");
    }
}
