//! Owns a run against a receiver of somebody else's making: it only sends, and the receiver's own output is looked at.

use std::time::Duration;

use cotenant_export::otlp::{Rates, Settings, Teller};
use cotenant_model::incident::{Incidents, Observation, Rules};

use super::stories::{call, waits};
use super::{Node, exported, resource, until};

/// `OTEL_EXPORTER_OTLP_*` say where. Run with `--ignored`.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "wants a collector; see agent/journal/2026-11-30-otlp.md"]
async fn a_real_receiver_takes_all_three_signals() {
    let wishes = cotenant_export::otlp::Wishes::default();
    let settings = Settings::resolve(&wishes, &|name| std::env::var(name).ok()).unwrap();
    assert!(settings.remarks.is_empty(), "{:?}", settings.remarks);
    let sender = Node::new().start(&Settings { interval: Duration::from_secs(1), ..settings });
    let account = sender.account();
    let mut teller = Teller::new(&sender, &resource(), Rates::default());
    let mut incidents = Incidents::new(Rules::default());
    for second in 0..45_u32 {
        let busy = second < 5;
        let at_unix = 1_795_999_990.0 + f64::from(second);
        let observation = Observation {
            at_unix,
            elapsed: 1.0,
            waits: if busy { waits(0.9) } else { Vec::new() },
            ..Observation::default()
        };
        let calls = if busy { vec![call(at_unix - 0.75, 0.5)] } else { Vec::new() };
        let changes = incidents.observe(&observation);
        teller.tell(&incidents, &changes, &observation, calls);
    }
    for signal in ["metrics", "traces", "logs"] {
        until(signal, || exported(&account, signal) > 0).await;
    }
    let views = tokio::task::spawn_blocking(move || sender.stop()).await.unwrap();
    for view in views {
        eprintln!("{}: {} exported, dropped {:?}", view.signal, view.exported, view.dropped);
        assert!(view.dropped.iter().all(|(_, items)| *items == 0), "{view:?}");
    }
}
