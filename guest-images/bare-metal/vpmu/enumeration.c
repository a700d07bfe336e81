/* CPUID says what the VMM was told to offer, and nothing of another vendor's. */
#include "check.h"

TEST(model_is_the_one_asked_for, ON_ANY, "enumeration: CPUID shows the model, counters and width the VMM was told")
{
    static const char *const versions[] = { "intel-v1", "intel-v2", "intel-v3", "intel-v4", "intel-v5" };
    const char *name = pmu.kind == PMU_K7 ? "amd-k7" : pmu.kind == PMU_CORE ? "amd" : pmu.kind == PMU_V2 ? "amd-v2" : "";

    if (pmu.kind == PMU_INTEL && pmu.version <= ARRAY_LEN(versions))
        name = versions[pmu.version - 1];
    kprintf("# %s version %u, %u general, fixed bitmap 0x%x, %u bits\n", pmu_name(), pmu.version, pmu.gp, pmu.fixed,
            pmu.width);
    if (option_value("model"))
        CHECK(option_is("model", name), "CPUID shows %s", name);
    CHECK(pmu.gp == option_number("gp", pmu.gp), "CPUID shows %u", pmu.gp);
    CHECK(bit_count(pmu.fixed) == option_number("fixed", bit_count(pmu.fixed)), "CPUID shows 0x%x", pmu.fixed);
    CHECK(pmu.width == option_number("width", pmu.width), "CPUID shows %u", pmu.width);
    CHECK(pmu.gp >= 1);
    CHECK(pmu.width >= 32 && pmu.width <= 64);
}

TEST(leaf_a_fields, ON_INTEL, "enumeration: CPUID 0AH has the fields of its version and no others")
{
    struct cpuid c = cpuid(0xa, 0);

    CHECK(c.eax >> 24 >= 7, "length of the event mask %u", c.eax >> 24);
    if (pmu.version == 1)
        CHECK(c.edx == 0, "EDX 0x%x", c.edx);
    else
        CHECK((c.edx >> 5 & 0xff) == pmu.width, "width of fixed counters %u", c.edx >> 5 & 0xff);
    if (pmu.version < 5)
        CHECK(c.ecx == 0, "ECX 0x%x", c.ecx);
    else
        CHECK((~pmu.fixed & (BIT(c.edx & 0x1f) - 1)) == 0, "ECX 0x%x, EDX 0x%x", c.ecx, c.edx);
    CHECK(c.ebx >> (c.eax >> 24) == 0, "EBX 0x%x", c.ebx);
}

TEST(pdcm_matches_capabilities, ON_INTEL, "enumeration: IA32_PERF_CAPABILITIES exists if and only if CPUID.1:ECX.PDCM")
{
    u64 v;
    CHECK(rdmsr_safe(MSR_PERF_CAPABILITIES, &v) == !pmu.pdcm);
}

TEST(no_debug_store, ON_ANY, "enumeration: no debug store, PEBS or model-specific branch records are announced")
{
    u64 caps;
    CHECK(!(cpuid(1, 0).edx & BIT(21)));
    if (pmu.pdcm && !rdmsr_safe(MSR_PERF_CAPABILITIES, &caps)) {
        CHECK((caps & 0x3f) == (pmu.branch_records ? 0x3f : 0), "LBR format, capabilities 0x%lx", caps);
        CHECK((caps & 0xf00) == 0, "PEBS format, capabilities 0x%lx", caps);
    }
}

TEST(amd_core_bit, ON_AMD, "enumeration: CPUID 80000001H ECX.23 and 80000022H fit the generation")
{
    bool core = cpuid(0x80000001, 0).ecx & BIT(23);
    bool v2 = cpuid(0x80000000, 0).eax >= 0x80000022 && (cpuid(0x80000022, 0).eax & 1);

    CHECK(core == (pmu.kind != PMU_K7));
    CHECK(v2 == (pmu.kind == PMU_V2));
    if (cpuid(0, 0).eax >= 0xa)
        CHECK(cpuid(0xa, 0).eax == 0, "EAX 0x%x", cpuid(0xa, 0).eax);
}

TEST(no_amd_registers_on_intel, ON_INTEL, "enumeration: AMD's registers do not exist on an Intel PMU")
{
    static const u32 msrs[] = { MSR_K7_EVNTSEL0, MSR_K7_PERFCTR0, MSR_F15H_CTL0, MSR_F15H_CTR0,
                                MSR_V2_STATUS, MSR_V2_CTL, MSR_V2_STATUS_CLR, MSR_V2_STATUS_SET };
    for (u32 i = 0; i < ARRAY_LEN(msrs); i++) {
        CHECK(rdmsr_gp(msrs[i]), "RDMSR 0x%x", msrs[i]);
        CHECK(wrmsr_gp(msrs[i], 0), "WRMSR 0x%x", msrs[i]);
    }
}

TEST(no_intel_registers_on_amd, ON_AMD, "enumeration: Intel's registers do not exist on an AMD PMU")
{
    static const u32 msrs[] = { MSR_EVNTSEL0, MSR_FIXED_CTR0, MSR_PERF_CAPABILITIES, MSR_FIXED_CTR_CTRL,
                                MSR_GLOBAL_STATUS, MSR_GLOBAL_CTRL, MSR_GLOBAL_OVF_CTRL, MSR_A_PMC0 };
    for (u32 i = 0; i < ARRAY_LEN(msrs); i++) {
        CHECK(rdmsr_gp(msrs[i]), "RDMSR 0x%x", msrs[i]);
        CHECK(wrmsr_gp(msrs[i], 0), "WRMSR 0x%x", msrs[i]);
    }
}
