/* Registers at reset, as found before the first write. */
#include "check.h"

TEST(counters_reset, ON_ANY, "reset: selectors and counters are 0")
{
    for (u32 i = 0; i < pmu.gp; i++) {
        CHECK(boot_state.selectors[i] == 0, "selector %u: 0x%lx", i, boot_state.selectors[i]);
        CHECK(boot_state.counters[i] == 0, "counter %u: 0x%lx", i, boot_state.counters[i]);
    }
    for (u32 i = 0; i < 32; i++)
        CHECK(boot_state.fixed[i] == 0, "fixed counter %u: 0x%lx", i, boot_state.fixed[i]);
}

/* SDM volume 3, table of processor states after reset: IA32_PERF_GLOBAL_CTRL sets bits n-1:0; AMD's PPRs say the same. */
TEST(global_control_reset, ON_INTEL | ON_V2, "reset: global control has a one for each general counter and no other")
{
    if (!pmu.global)
        SKIP("version 1 has no global control");
    CHECK(boot_state.global_ctrl == BIT(pmu.gp) - 1, "0x%lx", boot_state.global_ctrl);
    CHECK(boot_state.status == 0, "status 0x%lx", boot_state.status);
}

TEST(intel_control_reset, ON_INTEL, "reset: fixed control and freeze-on-PMI are 0")
{
    CHECK(boot_state.fixed_ctrl == 0, "0x%lx", boot_state.fixed_ctrl);
    CHECK(!(boot_state.debugctl & DEBUGCTL_FREEZE_PMI), "0x%lx", boot_state.debugctl);
}
