//! Owns a look at one run: `trace SCENARIO SEED FROM TO [EVERY]` prints what was forecast.
//! Refuses to score.

use cotenant_model::risk::Forecaster;
use cotenant_risk_runs::SCENARIOS;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [scenario, seed, from, to, rest @ ..] = arguments.as_slice() else {
        eprintln!("usage: trace SCENARIO SEED FROM TO [EVERY]; scenarios: {SCENARIOS:?}");
        std::process::exit(2);
    };
    let number = |text: &str| text.parse::<u64>().expect("a number");
    let (seed, from, to) = (number(seed), number(from), number(to));
    let every = rest.first().map_or(1, |text| number(text));
    let found = SCENARIOS.into_iter().find(|of| format!("{of:?}") == *scenario).expect("a scenario");
    let mut forecaster = Forecaster::default();
    for moment in found.run(seed).moments() {
        let forecast = forecaster.advance(&moment);
        let second = moment.at.as_secs();
        if !(from..=to).contains(&second) || second % every != 0 {
            continue;
        }
        for gpu in &forecast.gpus {
            let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
            print!(
                "{second:>6} free {:>7.2} risk {:.2?} x{} ",
                gib(gpu.headroom.free),
                gpu.risk,
                u8::from(gpu.exhausted)
            );
            for tenant in &gpu.tenants {
                print!(
                    "| {} {:.2} rate {:.3} share {:.2} p90 {:.2} ",
                    tenant.tenant,
                    gib(tenant.live),
                    tenant.rate / (1u64 << 30) as f64,
                    tenant.share,
                    gib(tenant.growth[1].p90)
                );
            }
            println!("| {:?}", gpu.victims.iter().map(ToString::to_string).collect::<Vec<_>>());
        }
    }
}
