/* The multiboot command line as words and name=value pairs, and the CPU count from fw_cfg. */
#include "lib.h"

#define MULTIBOOT_HAS_CMDLINE BIT(2)
#define FW_CFG_SELECT 0x510
#define FW_CFG_DATA 0x511
#define FW_CFG_SIGNATURE 0
#define FW_CFG_CPUS 5

static char line[512];

void cmdline_setup(u32 info)
{
    const u32 *mb = (const u32 *)(u64)info;
    u32 n = 0;

    if (info && (mb[0] & MULTIBOOT_HAS_CMDLINE) && mb[4])
        for (const char *s = (const char *)(u64)mb[4]; s[n] && n < sizeof(line) - 1; n++)
            line[n] = s[n];
    line[n] = 0;
}

const char *cmdline(void) { return line; }

bool str_eq(const char *a, const char *b)
{
    for (; *a && *a == *b; a++, b++)
        ;
    return *a == *b;
}

/* Where the word `name` (or name=…) begins to differ from the command line, or NULL. */
static const char *find(const char *name, char end)
{
    for (const char *s = line; *s;) {
        const char *n = name;
        while (*s == ' ')
            s++;
        while (*n && *s == *n)
            s++, n++;
        if (!*n && (*s == end || (end == ' ' && !*s)))
            return s;
        while (*s && *s != ' ')
            s++;
    }
    return NULL;
}

bool option(const char *name) { return find(name, ' ') != NULL; }

const char *option_value(const char *name)
{
    const char *s = find(name, '=');
    return s ? s + 1 : NULL;
}

bool option_is(const char *name, const char *value)
{
    const char *s = option_value(name);
    if (!s)
        return false;
    while (*value && *s == *value)
        s++, value++;
    return !*value && (*s == ' ' || !*s);
}

u64 parse_number(const char **s)
{
    u64 v = 0;
    u32 base = 10;

    if ((*s)[0] == '0' && ((*s)[1] | 0x20) == 'x') {
        base = 16;
        *s += 2;
    }
    for (;; (*s)++) {
        char c = **s;
        u32 digit = c >= '0' && c <= '9' ? c - '0' : (c | 0x20) >= 'a' && (c | 0x20) <= 'f' ? (c | 0x20) - 'a' + 10 : 99;
        if (digit >= base)
            return v;
        v = v * base + digit;
    }
}

u64 option_number(const char *name, u64 otherwise)
{
    const char *s = option_value(name);
    return s ? parse_number(&s) : otherwise;
}

static u32 fw_cfg_read32(u16 key)
{
    u32 v = 0;
    outw(FW_CFG_SELECT, key);
    for (u32 i = 0; i < 4; i++)
        v |= (u32)inb(FW_CFG_DATA) << 8 * i;
    return v;
}

u32 fw_cfg_cpus(void)
{
    u32 n;
    if (fw_cfg_read32(FW_CFG_SIGNATURE) != 0x554d4551) /* "QEMU", which every fw_cfg says */
        return 1;
    n = fw_cfg_read32(FW_CFG_CPUS) & 0xffff;
    return n < 1 ? 1 : n > MAX_CPUS ? MAX_CPUS : n;
}
