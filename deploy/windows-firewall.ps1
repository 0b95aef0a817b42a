# In PowerShell, as an administrator. Private networks only: at home, and not in a cafe. Again: as before.
$rules = @(
    @{ Name = 'meshtrain-links'; DisplayName = 'meshtrain: links and pairing'; Protocol = 'TCP'; LocalPort = 29610 },
    @{ Name = 'meshtrain-mdns'; DisplayName = 'meshtrain: mDNS'; Protocol = 'UDP'; LocalPort = 5353 }
)
foreach ($rule in $rules) {
    Remove-NetFirewallRule -Name $rule.Name -ErrorAction SilentlyContinue
    New-NetFirewallRule @rule -Direction Inbound -Action Allow -Profile Private -RemoteAddress LocalSubnet
}
